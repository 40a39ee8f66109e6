"""Slides: read from any scanner's file, converted to checked zarr stores, and fed to the engine tile by tile.

    readers/        one protocol, a reader for each library; `open_reader` chooses by content
    store/          the stores: layout, codecs, shards, journal, manifest of hashes
    settings                    the options of preprocess and tissue, each written once
    tissue, rules, overview     the tissue mask, what rules change of it, its picture; review: the command tissue
    inputs, walk, names         which slides a user means
    convert, pool, preprocess   one slide, many slides, the command; verify
    stores                      stores.csv, and the store of a slide by its name
    source, augment, stain      what training reads

Import what you need from its module; nothing is imported here, so that the command line starts fast.
"""
