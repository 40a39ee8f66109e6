"""Systematic faults: what the project asks of the system fails at the n-th call; see docs/how-to/faults.md."""
