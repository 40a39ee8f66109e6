"""A batch of one slide, as data loaders make it and networks take it.

The processes of a data loader import this file, and not the networks, which need Lightning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, cast

import torch
from torch import Tensor


class SlideBatch(TypedDict):
    """One slide: its pixels (uint8, or already float in 0..1), its targets, and its name.

    Version 1.0 had `label`, and `auxiliary` for the target of the slide beside that of its pixels. Both may be read of
    batches of this package, and given to its networks, with a `DeprecationWarning`.
    """

    image: Tensor
    targets: dict[str, Tensor]
    """The targets that are known of the slide, by name, as the task's `target` makes them; where each pixel has a
    class, the map of them, (1, 1, height, width).
    """
    slide: str
    context: NotRequired[list[Tensor]]
    """The same slide at further magnifications, from fine to coarse."""
    tissue: NotRequired[list[Tensor]]
    """Mask of the positions of the map that count, (1, 1, h, w), for the image and for each of its context."""
    places: NotRequired[Tensor]
    """x and y of the upper left corner of each patch of a bag or of features, in sides of a patch, (1, 2, patches, 1),
    where the head asks for them (`Pooling.wants_places`).
    """
    covariates: NotRequired[Tensor]
    """The numbers of `model.covariates`, (1, width), as `Covariates.table` has them."""
    failure: NotRequired[str]
    """Why the slide could not be opened; there is no image then."""


FORMER = ("label", "auxiliary")
"""Keys of a batch of 1.0: its target, where there are two that of pixels, and then that of the slide."""


def deprecate(key: str) -> None:
    """Warn of a key of 1.0."""
    warnings.warn(
        f"SlideBatch has 'targets' by name in place of {key!r}; version 2 removes {key!r}", DeprecationWarning,
        stacklevel=3,
    )  # fmt: skip


class _WithFormer(dict[str, Any]):
    """A batch of which the keys of 1.0 may be read."""

    def __missing__(self, key: str) -> Tensor:
        targets: list[Tensor] = sorted(self["targets"].values(), key=lambda target: -target.ndim)
        if key not in FORMER or len(targets) <= FORMER.index(key):
            raise KeyError(key)
        deprecate(key)
        return targets[FORMER.index(key)]


def make_batch(image: Tensor, targets: Mapping[str, Tensor], slide: str) -> SlideBatch:
    """A batch of a slide, of which the keys of 1.0 may be read."""
    return cast(SlideBatch, _WithFormer(image=image, targets=dict(targets), slide=slide))


def side_by_side(patches: int) -> Tensor:
    """Places of patches that fill a square, as a batch has them, of a step that is planned without a slide."""
    number, side = torch.arange(patches, device="cpu"), math.isqrt(patches - 1) + 1
    return torch.stack([number % side, number // side]).float()[None, :, :, None]
