"""Execution of a recording under a plan, forward and backward."""
