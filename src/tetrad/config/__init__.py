"""What a user may set, and what was decided from it: checked once, frozen, read by everything above."""
