"""Features of patches by an encoder that is not trained: written once, read by many heads and by other programs."""
