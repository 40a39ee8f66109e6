"""Slides as data: the manifest, splits, and the loaders that make batches of one slide."""
