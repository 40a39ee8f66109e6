"""Every network of the zoo, tiled, gives what plain PyTorch gives: in float64, in both modes, at two sizes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from tests.exactness import assert_exact
from tests.lightning_plugin.cases import GRIDS, noting, still
from tests.zoo import STRUCTURED, ZOO, ZooEntry, fill

ENTRIES = [*ZOO.values(), *STRUCTURED.values()]
MODES = {"train": True, "eval": False}
#: Networks that differ from another of the zoo in depth alone, or in what is drawn: only in a full run.
VARIANTS = {
    "vgg19", "vgg16_dropout", "resnet34", "densenet121_dropout", "mobilenet_v3_large_dropout", "vnet_dropout",
    "efficientnet_b0_drop_path", "fpn_dropout", "deeplab_dropout",
}  # fmt: skip
#: Of a sampled run: one way for every third of the other networks, another for every twelfth.
MOST, FEW = ("train", "shape", GRIDS[0]), ("eval", "other_shape", GRIDS[1])


def cases() -> Iterator[Any]:
    for number, entry in enumerate(ENTRIES):
        for way in product(MODES, ("shape", "other_shape"), GRIDS):
            sampled = entry.name not in VARIANTS and (
                (way == MOST and number % 3 == 0) or (way == FEW and number % 12 == 0)
            )
            name = f"{entry.name}-{way[0]}-{way[1]}-grids{GRIDS.index(way[2])}"
            yield pytest.param(entry, *way, id=name, marks=[] if sampled else [pytest.mark.full])


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "mode", "size", "grids"), list(cases()))
def test_zoo_is_exact(entry: ZooEntry, mode: str, size: str, grids: tuple) -> None:
    net = still(fill(entry.build().double())).train(MODES[mode])
    assert_exact(net, getattr(entry, size), engine=noting(*grids))
