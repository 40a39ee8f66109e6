"""Recording of a user's calls on lazy tensors as a graph of nodes and values; see `record`."""
