"""Channel counts under a width multiplier."""

from __future__ import annotations


def scaled(channels: int, width_mult: float, divisor: int = 1) -> int:
    """``channels * width_mult``, rounded to a multiple of ``divisor`` and never below it."""
    return max(divisor, divisor * round(channels * width_mult / divisor))


def make_divisible(channels: float, divisor: int = 8) -> int:
    """The mobile networks' rounding: to a multiple of ``divisor``, losing at most a tenth."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded
