"""Slides: read from any scanner's file, converted to checked zarr stores, and fed to the engine tile by tile.

    readers/        one protocol, a reader for each library; `open_reader` chooses by content
    store/          the stores: layout, codecs, shards, journal, manifest of hashes
    tissue, overview, label     the tissue mask and its picture
    convert, pool, preprocess   one slide, many slides, the command; verify
    source, augment, stain      what training reads

Import what you need from its module; nothing is imported here, so that the command line starts fast.
"""
