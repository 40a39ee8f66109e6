"""Readers of slides behind one protocol; `open_reader` chooses by content."""

from .protocol import Level, Reader, SlideInfo
from .registry import open_reader

__all__ = ["Level", "Reader", "SlideInfo", "open_reader"]
