"""Random numbers as a function of key, call and position.

Each element of a map has a number: its flat index in the whole map, batch and channels included. Its random bits are a
hash of this number, the step's key and the number of the call. So a recomputed tile draws the same numbers again, and
the result does not depend on tiles.

The hash is the finaliser of SplitMix64, which turns counters into independent bits. Integers wrap around in
64 bits; a right shift of a negative one brings in ones, which are masked off.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.layout import Axis, Layout

GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
CHUNK = 1 << 20
"""Number of elements hashed at once, so that 64-bit temporaries are small compared with a tile."""

#: Random bits of a number of each type, so that it stays below one.
BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def signed(number: int) -> int:
    """Return an integer modulo 2^64 as a signed 64-bit integer."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def hash_number(number: int) -> int:
    z = number & ((1 << 64) - 1)
    for shift, factor in ROUNDS:
        z = ((z ^ (z >> shift)) * factor) & ((1 << 64) - 1)
    return z


def hash_bits(z: Tensor) -> Tensor:
    """Hash 64-bit integers in place."""
    for shift, factor in ROUNDS:
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        z *= signed(factor)
    return z


def top_bits(z: Tensor, bits: int) -> Tensor:
    """Shift 64-bit integers to their highest bits, as non-negative numbers, in place."""
    z >>= 64 - bits
    return z.bitwise_and_((1 << bits) - 1)


@dataclass(frozen=True)
class Stream:
    """Random numbers of one call. Plans and tile programs depend on neither field.

    Attributes:
        call: Number of the call in the step.
        key: Key of the step.
    """

    call: int = field(compare=False)
    key: int = field(compare=False)

    def base(self, part: int) -> int:
        return signed(hash_number(hash_number(self.key) ^ hash_number(self.call * 4 + part + 1)))

    def fill(self, out: Tensor, layout: Layout, box: Box, draw: Callable[[Callable[[int], Tensor]], Tensor]) -> Tensor:
        """Fill a tile by chunks. ``draw`` returns a chunk; it gets a function that hashes the chunk's positions."""
        factors = [f for dim in layout.dims for f in dim] or [1]
        sizes = [box.extent[f.index] if isinstance(f, Axis) else f for f in factors]
        lines = list(coordinates(layout, box, out.device))
        view = out.view(sizes)
        for place in chunks(sizes):
            index = torch.zeros((), dtype=torch.int64, device=out.device)
            for line, part in zip(lines, place, strict=True):
                index = index.unsqueeze(-1) + line[part]
            view[place] = draw(partial(self.bits, index.mul_(signed(GOLDEN))))
        return out

    def bits(self, scaled: Tensor, part: int) -> Tensor:
        return hash_bits(scaled + self.base(part))

    def keep(self, p: float, layout: Layout, box: Box, device: torch.device) -> Tensor:
        """Return a mask that is false with probability p."""
        bar = round(p * 2**53)
        out = torch.empty(layout.tile_shape(box), dtype=torch.bool, device=device)
        return self.fill(out, layout, box, lambda bits: top_bits(bits(0), 53) >= bar)

    def uniform(self, layout: Layout, box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uniform in [0, 1)."""
        bits = BITS[dtype]
        out = torch.empty(layout.tile_shape(box), dtype=dtype, device=device)
        return self.fill(out, layout, box, lambda draw: top_bits(draw(0), bits).to(dtype) * 2.0**-bits)

    def normal(self, layout: Layout, box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Standard normal, by Box and Muller's transform."""
        out = torch.empty(layout.tile_shape(box), dtype=dtype, device=device)

        def draw(bits: Callable[[int], Tensor]) -> Tensor:
            radius = (top_bits(bits(0), 53) + 1).double().mul_(2.0**-53).log_().mul_(-2).sqrt_()
            return radius * top_bits(bits(1), 53).double().mul_(2 * math.pi * 2.0**-53).cos_()

        return self.fill(out, layout, box, draw)

    def exponential(self, layout: Layout, box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Exponential with rate one, never zero."""
        out = torch.empty(layout.tile_shape(box), dtype=dtype, device=device)
        return self.fill(
            out, layout, box, lambda bits: -(top_bits(bits(0), 53).double().add_(0.5).mul_(2.0**-53).log_())
        )


def coordinates(layout: Layout, box: Box, device: torch.device) -> Iterator[Tensor]:
    """Yield, for each factor of a layout, the contribution of its positions in a tile to the flat index in the map."""
    factors = [f for dim in layout.dims for f in dim] or [1]
    sizes = [layout.extent[f.index] if isinstance(f, Axis) else f for f in factors]
    for place, f in enumerate(factors):
        step = math.prod(sizes[place + 1 :])
        lo, hi = (box.lo[f.index], box.hi[f.index]) if isinstance(f, Axis) else (0, f)
        yield torch.arange(lo, hi, device=device) * step


def chunks(sizes: list[int]) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cut a tensor of these sizes into chunks of at most CHUNK elements."""
    d = 0
    while d < len(sizes) - 1 and math.prod(sizes[d + 1 :]) > CHUNK:
        d += 1
    rows = max(1, CHUNK // max(1, math.prod(sizes[d + 1 :])))
    for outer in itertools.product(*(range(s) for s in sizes[:d])):
        for start in range(0, sizes[d], rows):
            yield (
                *(slice(i, i + 1) for i in outer),
                slice(start, min(sizes[d], start + rows)),
                *(slice(None) for _ in sizes[d + 1 :]),
            )
