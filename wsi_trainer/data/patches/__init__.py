"""Patches of a slide as a bag: which there are, and the source that a step reads them from."""
