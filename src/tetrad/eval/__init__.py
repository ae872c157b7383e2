"""Recall of facts: a measurement of accuracy that goes through the engine like any user."""
