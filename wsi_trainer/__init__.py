"""Slides in, a trained and explained slide classifier out.

Importing this package imports nothing heavy: its parts are imported by name when they are used.
"""

__version__ = "1.0.0"
