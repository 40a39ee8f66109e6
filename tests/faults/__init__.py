"""Systematic faults: every read, write, allocation and start of a process fails at its n-th call; see docs/faults.md."""
