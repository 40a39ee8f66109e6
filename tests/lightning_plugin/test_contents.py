"""Images that say nothing: one value all over, known to be or not, and networks of the zoo on them as in PyTorch.

In train mode variances of equal values are divided by, and rounding errors multiplied by hundreds in every layer: where
plain PyTorch itself moves by more than the tolerance when its input is rounded once, that is the bound.
"""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, materialize
from lightning_plugin.boxes import Box
from lightning_plugin.engine import Engine
from lightning_plugin.options import Options
from lightning_plugin.plans import Planner
from tests.exactness import TOLERANCE, asked, compare, flat
from tests.lightning_plugin.background import Background
from tests.sampling import sampled
from tests.zoo import ZOO, ZooEntry, fill
from wsi_trainer.models import (
    AttentionPooling,
    AveragePooling,
    DualStreamPooling,
    GeneralisedMeanPooling,
    MaxPooling,
    MeanMLP,
    PatchEncoder,
    TopKPooling,
    TransformerPooling,
    TransMILPooling,
)

NETWORKS = [entry for entry in ZOO.values() if not entry.stochastic]
VALUES = (0.0, 1.0, 255.0)


def step(net: nn.Module, image: Any, seed: int = 0) -> list[Tensor]:
    """Outputs of a step whose loss is a weighted sum of them; gradients are left in the network."""
    out = flat(net(image))
    torch.manual_seed(seed)
    weights = [torch.randn(o.shape, dtype=o.dtype) for o in out]
    sum(((o * w).sum() for o, w in zip(out, weights, strict=True)), torch.zeros(())).backward()
    return [materialize(o) for o in out]


def cases() -> list[Any]:
    """Every fourth network in one way in a sampled run, and each way of one network."""
    found = []
    for i, entry in enumerate(NETWORKS):
        for j, way in enumerate(product(VALUES, (False, True), ("train", "eval"))):
            marks = [] if i % 48 == 4 * j else [pytest.mark.full]
            found.append(pytest.param(entry, *way, id="-".join([entry.name, *map(str, way)]), marks=marks))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "value", "knows", "mode"), cases())
def test_a_constant_image_is_no_special_case(entry: ZooEntry, value: float, knows: bool, mode: str) -> None:
    net = fill(entry.build().double()).train(mode == "train")
    twin, rounded = copy.deepcopy(net), copy.deepcopy(net)
    image = torch.full(entry.shape, value, dtype=torch.float64)
    space = image.dim() - 2
    source = Background(image, Box((0,) * space, (0,) * space), value) if knows and len(image) == 1 else image
    expected = step(net, image)
    actual = step(twin, LazyImage(source, engine=asked((3, 2, 2)[:space])))
    assert all(e.isfinite().all() for e in expected)
    found = compare(net, twin, actual, expected, (None, None))
    wrong = {name: error for name, error in found.items() if not error < TOLERANCE}
    if wrong:
        torch.manual_seed(1)
        jitter = image + 2e-16 * max(1.0, value) * torch.randn_like(image)
        moved = max(compare(net, rounded, step(rounded, jitter), expected, (None, None)).values())
        wrong = {name: error for name, error in wrong.items() if not error < 100 * moved}
    assert not wrong, f"tiled and plain differ: {wrong}"


HEADS = {
    "average": AveragePooling,
    "maximum": MaxPooling,
    "generalised mean": GeneralisedMeanPooling,
    "attention": AttentionPooling,
    "top k": TopKPooling,
    "mean": MeanMLP,
    "DSMIL": partial(DualStreamPooling, queries=4),
    "transformer": partial(TransformerPooling, width=8, heads=2),
    "TransMIL": partial(TransMILPooling, width=8, heads=2, landmarks=4, dropout=0.0),
}


class Bag(nn.Module):
    """An encoder of patches and a head over the bag."""

    def __init__(self, head: str) -> None:
        super().__init__()
        network = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1))
        self.encoder = PatchEncoder(network, size=12)
        self.head = HEADS[head](6)
        self.head.attach(1)

    def forward(self, patches: Tensor) -> Tensor:
        return self.head(self.encoder(patches))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("head", "patches", "way"), sampled(HEADS, [1, 2], [{"tiles": (3,)}, {"budget": "1GiB"}], every=2)
)
def test_a_bag_of_one_patch_is_a_bag(head: str, patches: int, way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = fill(Bag(head).double()).train()
    twin = copy.deepcopy(net)
    bag = torch.randn(patches, 3, 12, 12, dtype=torch.float64)
    expected = step(net, bag)
    actual = step(twin, LazyImage(bag, engine=Engine(Planner(Options.parse(way)))))
    found = compare(net, twin, actual, expected, (None, None))
    wrong = {name: error for name, error in found.items() if not error < TOLERANCE}
    assert not wrong, f"tiled and plain differ: {wrong}"
