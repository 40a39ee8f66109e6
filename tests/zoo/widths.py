"""Channel counts under a width multiplier."""

from __future__ import annotations


def scaled(channels: int, width_mult: float, divisor: int = 1) -> int:
    """``channels * width_mult``, rounded to a multiple of ``divisor`` and never below it."""
    return max(divisor, divisor * round(channels * width_mult / divisor))
