"""What a plan holds, found by running it on tensors without data."""
