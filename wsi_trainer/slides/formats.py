"""What PyTorch calls the order in which pixels lie; apart from `order`, since converting slides needs no PyTorch."""

from __future__ import annotations

import torch

FORMATS = {"planes": torch.contiguous_format, "pixels": torch.channels_last}
"""The memory format of each order."""


def format_of(source: object) -> torch.memory_format:
    """How the pixels of a source's boxes lie in memory, where it says so."""
    said: torch.memory_format = getattr(source, "memory_format", torch.contiguous_format)
    return said
