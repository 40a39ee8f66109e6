"""Commands that convert slides: `preprocess`, `tissue` and `verify`.

    inputs              slides that a user means by a folder, a pattern, a file or a table
    preprocess, pool    the command, and its processes
    review              the command `tissue`: masks to look at and edit
    results             table, notes, failures.csv and the page of masks
    stores, staging     stores.csv, the store of a slide by its name; locks and unfinished stores
    verify              stores read again and compared with their hashes

Import what you need from its module; nothing is imported here, so that the command line starts fast.
"""
