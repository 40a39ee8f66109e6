"""Fitting a slide classifier from a config: one run or a cross-validation, what it writes, and how it goes on."""
