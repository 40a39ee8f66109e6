"""Weights in the layout of a network: renamed as timm renames them, position embeddings for another size of patch."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import Tensor, nn

from wsi_trainer.models.backbones import import_timm

POSITIONS = ("pos_embed", "position_embeddings")


def trunk_of(module: nn.Module) -> nn.Module:
    """The network itself, out of what gives its vectors another form."""
    while isinstance(inner := getattr(module, "trunk", None), nn.Module):
        module = inner
    return module


def as_timm(given: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Weights as they are named today, where the network is timm's and timm knows how they were named before."""
    if type(module).__module__.partition(".")[0] != "timm":
        return given
    rename = getattr(sys.modules[type(module).__module__], "checkpoint_filter_fn", None)
    return given if rename is None or not _old(given) else rename(dict(given), module)


def _old(given: Mapping[str, Tensor]) -> bool:
    """Whether these are weights of DINOv2's own code, or of a Swin transformer of timm before 0.9."""
    return "mask_token" in given or any(name.endswith("relative_position_index") for name in given)


def resampled(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The position embeddings whose square has another side than the network's, interpolated to that.

    Tokens that stand before those of the patch keep theirs.
    """
    found = {}
    for name, value in given.items():
        if not name.endswith(POSITIONS) or name not in own or value.ndim != 3 or own[name].ndim != 3:
            continue
        there, here = value.shape[1], own[name].shape[1]
        before = [n for n in range(16) if _is_square(there - n) and _is_square(here - n)]
        if there != here and before and value.shape[2] == own[name].shape[2]:
            side = round((here - before[0]) ** 0.5)
            resample = import_timm().layers.resample_abs_pos_embed
            found[name] = resample(value, [side, side], num_prefix_tokens=before[0])
    return found


def _is_square(count: int) -> bool:
    return count > 0 and round(count**0.5) ** 2 == count
