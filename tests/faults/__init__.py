"""Systematic faults: reads, writes, allocations and starts of processes fail at the n-th call; see docs/faults.md."""
