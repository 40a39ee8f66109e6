"""Every parser and reader on files that were changed by chance: see `docs/how-to/fuzzing.md`."""
