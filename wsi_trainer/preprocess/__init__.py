"""Commands that convert slides: `preprocess`, `tissue` and `verify`.

    inputs          slides that a user means by a folder, a pattern, a file or a table
    command, pool   `preprocess`, and its processes
    tissue          the command `tissue`: masks to look at and edit
    results         table, notes, failures.csv and the page of masks
    stores          stores.csv, the store of a slide by its name, the slide of a store
    verify          stores read again and compared with their hashes

Import what you need from its module; nothing is imported here, so that the command line starts fast.
"""
