"""Devices by name: those that this machine has, and cards that need not be there."""

from __future__ import annotations

import torch


def kinds() -> list[str]:
    """The kinds of devices that this machine has."""
    accelerators = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return ["cpu", *(name for name, there in accelerators.items() if there)]


def is_here(device: str) -> bool:
    """Whether a device is this machine's own: a kind that it has, with or without a number, and no card by its name."""
    kind, _, number = device.partition(":")
    return kind in kinds() and (not number or number.isdigit())
