"""A map as tokens."""

from __future__ import annotations

from torch import Tensor


def as_tokens(features: Tensor) -> Tensor:
    """From (N, channels, h, w) to (N, positions, channels)."""
    return features.flatten(2).transpose(1, 2)


def refuse_counts(head: object, counts: Tensor | None) -> None:
    """Refuse a map of which only some positions count, for a head whose tokens stand in relation to each other."""
    if counts is not None:
        raise ValueError(
            f"model.head {type(head).__name__} is for bags of patches (data.patches, data.features), all of which "
            "count; leave out pool_over: tissue, or choose a head that pools"
        )
