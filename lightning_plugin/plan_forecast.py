"""Predictions about a plan: the bytes that it is expected to hold on the device, and the seconds that it takes.

A forecast decides nothing about what is computed, and plans are compared without it: a rehearsal, another size or
other rates give a plan another forecast, and it stays the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SegmentForecast:
    """The figures of one segment.

    ``stored_bytes`` are those of its stored maps, ``forward_bytes`` and ``backward_bytes`` the most that is on the
    device at its turns. ``backward_needs`` is what its backward needs beyond what is held when it begins,
    ``retained_needs`` the same under ``retain_graph=True``, where nothing that is held is let go on the way.
    ``copied_bytes`` are the copies of parameters that live below, which each pass fetches.
    ``seconds`` and ``recompute`` (a share of its forward work) are its cost.
    """

    stored_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    backward_needs: int = 0
    retained_needs: int = 0
    seconds: float = 0.0
    recompute: float = 0.0
    copied_bytes: int = 0


@dataclass(frozen=True)
class ChainForecast:
    """The figures of a chain: what a slot takes, what a link needs at the most while it is pulled back, what one holds
    that is kept, how often links run forward before they are pulled back, all together, the seconds of a step, and the
    most that is on the device at its turns."""

    slot_bytes: int = 0
    link_bytes: int = 0
    kept_bytes: int = 0
    forwards: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Forecast:
    """The figures of a whole step.

    ``peak_bytes`` is the peak on the device, of which ``fixed_bytes`` are the parameters that live there, with their
    gradients and what optimizers keep for them, and ``reserve_bytes`` are left to the device's own libraries (see
    `planner.costs.rates`). ``held_bytes`` is what the call leaves there until its backward, ``plain_bytes`` what plain
    PyTorch would hold for backward: activations and input, of which ``index_bytes`` are pooling indices and masks.
    ``streamed_bytes`` are the parameters that live below, ``traffic_bytes`` what of them, and of
    their gradients, travels in a step. ``seconds`` and ``recompute`` (a share of the forward work)
    are the cost.
    """

    peak_bytes: int = 0
    plain_bytes: int = 0
    index_bytes: int = 0
    seconds: float = 0.0
    recompute: float = 0.0
    fixed_bytes: int = 0
    reserve_bytes: int = 0
    held_bytes: int = 0
    streamed_bytes: int = 0
    traffic_bytes: int = 0
