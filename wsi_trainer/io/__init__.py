"""Files: an atomic write, and tables."""
