"""The networks that the exactness tests run on, in plain PyTorch, as their users write them.

Nothing here knows of the engine.  ``ZOO`` holds the networks that return one tensor, ``STRUCTURED`` those
that return a tuple or a dict of tensors; ``fill`` makes the parameters deterministic.
"""

from __future__ import annotations

from . import (
    attention,
    bisenet,
    cifar_resnet,
    darknet,
    deeplab,
    fpn,
    googlenet,
    library,
    mil_heads,
    resnet,
    sequence,
    shufflenet,
    squeezenet,
    unet,
    unet3d,
    unet_variants,
    vgg,
    vnet,
)
from .entry import ZooEntry
from .fill import fill

__all__ = ["STRUCTURED", "ZOO", "ZooEntry", "fill"]


def _registry(*families: tuple[ZooEntry, ...]) -> dict[str, ZooEntry]:
    registry: dict[str, ZooEntry] = {}
    for entry in (entry for family in families for entry in family):
        if entry.name in registry:
            raise ValueError(f"two zoo entries are named {entry.name!r}")
        registry[entry.name] = entry
    return registry


ZOO: dict[str, ZooEntry] = _registry(
    vgg.ENTRIES,
    resnet.ENTRIES,
    cifar_resnet.ENTRIES,
    googlenet.ENTRIES,
    library.ENTRIES,
    darknet.ENTRIES,
    squeezenet.ENTRIES,
    shufflenet.ENTRIES,
    attention.ENTRIES,
    unet.ENTRIES,
    unet_variants.ENTRIES,
    unet3d.ENTRIES,
    vnet.ENTRIES,
    fpn.ENTRIES,
    deeplab.ENTRIES,
    bisenet.ENTRIES,
    mil_heads.ENTRIES,
    sequence.ENTRIES,
)

STRUCTURED: dict[str, ZooEntry] = _registry(unet_variants.STRUCTURED, fpn.STRUCTURED)
