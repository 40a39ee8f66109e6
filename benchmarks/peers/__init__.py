"""Other ways to train on large images, each in a process of its own, beside ours: `python -m benchmarks.peers --help`.

Files that a run needs in a peer's environment (`alone` and what it imports for that way) import nothing of the project
but `tests.zoo`, which needs PyTorch only.
"""
