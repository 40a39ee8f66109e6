"""Rehearsals: the memory of a plan, found by running it on tensors without data."""
