"""Stores of slides: OME-Zarr 0.5 in shards, made by a conversion that continues after any interruption.

convert.py     one slide to one store: options, tissue mask, conversion
writer.py      the pyramid, shard by shard; chunks.py: chunks and shards, both ways
ngff.py        metadata, and the tissue mask as a label
manifest.py    journal of finished shards, and hashes of all files: the checks for damage
identity.py    files, hashes and names of slides
export.py      copies as OME-NGFF 0.4, and associated images
"""
