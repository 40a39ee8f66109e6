"""Spellings: what users write in several operators, recognised and recorded as the one that it is."""
