"""Rules beside the tissue mask: each looks for one thing, and takes it out of the mask or puts it in."""
