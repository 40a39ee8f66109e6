"""A user's calls on lazy tensors, recorded as a graph of nodes and values; `record` says how."""
