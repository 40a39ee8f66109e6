"""Where images and maps lie in the slide that they were made from."""

from .place import Place

__all__ = ["Place"]
