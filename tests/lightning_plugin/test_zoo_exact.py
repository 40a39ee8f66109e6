"""Every network of the zoo, tiled, gives what plain PyTorch gives: in float64, in both modes, at two sizes."""

from __future__ import annotations

import pytest

from tests.exactness import assert_exact
from tests.lightning_plugin.cases import GRIDS, Noting, still
from tests.zoo import STRUCTURED, ZOO, ZooEntry, fill

ENTRIES = [*ZOO.values(), *STRUCTURED.values()]
MODES = {"train": True, "eval": False}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
@pytest.mark.parametrize(
    ("mode", "size", "grids"),
    [
        ("train", "shape", GRIDS[0]),
        ("eval", "other_shape", GRIDS[1]),
        *(
            pytest.param(mode, size, grids, marks=pytest.mark.full)
            for mode in MODES
            for size in ("shape", "other_shape")
            for grids in GRIDS
            if (mode, size, grids) not in (("train", "shape", GRIDS[0]), ("eval", "other_shape", GRIDS[1]))
        ),
    ],
)
def test_zoo_is_exact(entry: ZooEntry, mode: str, size: str, grids: tuple) -> None:
    net = still(fill(entry.build().double())).train(MODES[mode])
    assert_exact(net, getattr(entry, size), settings=Noting(*grids))
