"""Programs of segments: the nodes and boxes of a tile, and the tapes that run it."""
