"""Formats of slides: a reader for each, behind one base class."""
