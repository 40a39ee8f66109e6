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
    """Random numbers of one call. Plans and tile programs do not depend on its number.

    The step's ``key`` is a tensor without dimensions: a step that repeats recorded calls has its own.

    Attributes:
        call: Number of the call in the step.
    """

    call: int = field(compare=False)

    def fill(
        self,
        out: Tensor,
        key: Tensor,
        layout: Layout,
        box: Box,
        draw: Callable[[Callable[[int], Tensor]], Tensor],
        parts: int = 1,
    ) -> Tensor:
        """Fill a tile by chunks. ``draw`` returns a chunk; it gets a function that hashes the chunk's positions, in as
        many independent ``parts``."""
        hashed = hash_bits(key.clone())
        bases = [hash_bits(hashed ^ signed(hash_number(self.call * 4 + part + 1))) for part in range(parts)]
        factors = [f for dim in layout.dims for f in dim] or [1]
        sizes = [box.extent[f.index] if isinstance(f, Axis) else f for f in factors]
        lines = list(coordinates(layout, box, out.device))
        view = out.view(sizes)
        for place in chunks(sizes):
            index = torch.zeros((), dtype=torch.int64, device=out.device)
            for line, part in zip(lines, place, strict=True):
                index = index.unsqueeze(-1) + line[part]
            scaled = index.mul_(signed(GOLDEN))
            view[place] = draw(lambda part, scaled=scaled: hash_bits(scaled + bases[part]))  # type: ignore[misc]
        return out

    def keep(self, key: Tensor, p: float, layout: Layout, box: Box) -> Tensor:
        """Return a mask that is false with probability p."""
        bar = round(p * 2**53)
        out = torch.empty(layout.tile_shape(box), dtype=torch.bool, device=key.device)
        return self.fill(out, key, layout, box, lambda bits: top_bits(bits(0), 53) >= bar)

    def uniform(self, key: Tensor, layout: Layout, box: Box, dtype: torch.dtype) -> Tensor:
        """Uniform in [0, 1)."""
        bits = BITS[dtype]
        out = torch.empty(layout.tile_shape(box), dtype=dtype, device=key.device)
        return self.fill(out, key, layout, box, lambda draw: top_bits(draw(0), bits).to(dtype) * 2.0**-bits)

    def normal(self, key: Tensor, layout: Layout, box: Box, dtype: torch.dtype) -> Tensor:
        """Standard normal, by Box and Muller's transform."""
        out = torch.empty(layout.tile_shape(box), dtype=dtype, device=key.device)

        def draw(bits: Callable[[int], Tensor]) -> Tensor:
            radius = (top_bits(bits(0), 53) + 1).double().mul_(2.0**-53).log_().mul_(-2).sqrt_()
            return radius * top_bits(bits(1), 53).double().mul_(2 * math.pi * 2.0**-53).cos_()

        return self.fill(out, key, layout, box, draw, parts=2)

    def exponential(self, key: Tensor, layout: Layout, box: Box, dtype: torch.dtype) -> Tensor:
        """Exponential with rate one, never zero."""
        out = torch.empty(layout.tile_shape(box), dtype=dtype, device=key.device)
        return self.fill(
            out, key, layout, box, lambda bits: -(top_bits(bits(0), 53).double().add_(0.5).mul_(2.0**-53).log_())
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
