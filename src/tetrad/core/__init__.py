"""When and for whom: sequences, scheduling, blocks, and the plan of each step. Integers only; no torch."""
