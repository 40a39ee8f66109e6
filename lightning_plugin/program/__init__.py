"""Programs: what a segment computes for any of its tiles, the boxes that a tile needs, and the tapes that run it."""
