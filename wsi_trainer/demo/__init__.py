"""The demo: everything once, in a few minutes."""
