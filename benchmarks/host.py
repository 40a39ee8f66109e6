"""Python's share of a small step: what the engine adds to plain PyTorch where arithmetic hardly counts.

    python -m benchmarks.host [NAME ...] [--pairs 7] [--side 256]

A repeated step (forward, loss, backward) of narrow networks at batch 1, in evaluation mode (frozen statistics) and in
training mode, with one thread: with everything kept under a roomy budget, as one tile, and as 4 x 4 tiles. Plain
PyTorch and the engine take turns; a ratio is the median over pairs, of processor time. For 4 x 4 tiles the operators of
the smallest network are written by hand besides, as a loop over crops with their halos: what tiles cost without an
engine. `trainer` is a step of a LightningModule under `SFTStrategy` against Lightning's own strategy. Writes
benchmarks/results/host.json, a case for each network and mode.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.keep import keep_case
from lightning_plugin import TiledModule
from tests.zoo.resnet import BasicBlock, Bottleneck, ResNet
from tests.zoo.unet import PaddedUNet

Step = Callable[[], None]

#: Rows and columns of tiles of the tiled steps.
TILES = 4


def timm_network(name: str, **options: Any) -> nn.Module:
    import tests.torchvision_stub  # noqa: F401

    import timm  # isort: skip

    return timm.create_model(name, num_classes=4, **options)  # type: ignore[no-any-return]


def narrow_efficientnet() -> nn.Module:
    import tests.torchvision_stub  # noqa: F401

    from timm.models.efficientnet import _gen_efficientnet  # isort: skip

    return _gen_efficientnet("efficientnet_b0", channel_multiplier=1 / 8, depth_multiplier=1.0, num_classes=4)  # type: ignore[no-any-return]


class FiveOperators(nn.Module):
    """A convolution, a normalisation, and what follows: short enough to write its loop over crops by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18 of 2 channels": lambda: ResNet(BasicBlock, (2, 2, 2, 2), width_mult=1 / 32, num_classes=4),
    "resnet18 of 4 channels": lambda: ResNet(BasicBlock, (2, 2, 2, 2), width_mult=1 / 16, num_classes=4),
    "resnet50 of 2 channels": lambda: ResNet(Bottleneck, (3, 4, 6, 3), width_mult=1 / 32, num_classes=4),
    "unet of 2 channels": lambda: PaddedUNet(in_channels=3, width_mult=1 / 32),
    "vit of 32 channels": partial(
        timm_network, "vit_small_patch16_224", img_size=256, embed_dim=32, num_heads=2, depth=12
    ),
    "convnext of 4 channels": partial(timm_network, "convnext_atto", dims=(4, 8, 16, 32)),
    "efficientnet-b0 of an eighth": narrow_efficientnet,
    "five operators": FiveOperators,
}


def step_of(module: nn.Module, image: Tensor) -> Step:
    """Return a step that drops gradients, as a training loop does."""

    def step() -> None:
        module.zero_grad(set_to_none=True)
        module(image).square().mean().backward()

    return step


def by_hand(net: FiveOperators, image: Tensor) -> Step:
    """Return the step of a frozen network as a loop over crops: each with a halo of two positions, cut off again."""

    def step() -> None:
        net.zero_grad(set_to_none=True)
        side, count = image.shape[-1] // TILES, net(image[..., :1, :1]).shape[1] * image.shape[-1] ** 2
        for top in range(0, image.shape[-2], side):
            for left in range(0, image.shape[-1], side):
                y0, x0 = max(0, top - 2), max(0, left - 2)
                made = net(image[..., y0 : top + side + 2, x0 : left + side + 2])
                own = made[..., top - y0 : top - y0 + side, left - x0 : left - x0 + side]
                (own.square().sum() / count).backward()

    return step


def processor_ms(step: Step) -> float:
    begin = time.process_time()
    step()
    return 1e3 * (time.process_time() - begin)


def compare(ours: Step, theirs: Step, pairs: int, label: str) -> dict[str, float]:
    """Measure two steps in turns, after three of each."""
    for step in (ours, theirs) * 3:
        step()
    found = [(processor_ms(ours), processor_ms(theirs)) for _ in track(range(pairs), label)]
    return {
        "ms": round(statistics.median(a for a, _ in found), 2),
        "plain ms": round(statistics.median(b for _, b in found), 2),
        "ratio": round(statistics.median(a / b for a, b in found), 2),
    }


def measure(name: str, side: int, pairs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the cases of a network, one for each mode."""
    torch.manual_seed(0)
    net, image = NETWORKS[name](), torch.randn(1, 3, side, side)
    for mode in ("frozen", "train mode"):
        plain = copy.deepcopy(net).train(mode == "train mode")
        ways = {
            "kept": TiledModule(copy.deepcopy(plain), budget="8GiB"),
            "one tile": TiledModule(copy.deepcopy(plain), tiles=1),
            f"{TILES} x {TILES} tiles": TiledModule(copy.deepcopy(plain), tiles=(TILES, TILES)),
        }
        found: dict[str, Any] = {"side": side}
        for way, tiled in ways.items():
            found[way] = compare(step_of(tiled, image), step_of(plain, image), pairs, f"{name}, {mode}, {way}")
        if isinstance(plain, FiveOperators) and mode == "frozen":
            hand = by_hand(plain, image)
            found["over a loop by hand"] = compare(step_of(tiled, image), hand, pairs, f"{name}, by hand")
        yield f"{name}, {mode}", found


def measure_trainer(side: int, steps: int) -> dict[str, Any]:
    """Measure steps of a LightningModule under `SFTStrategy` with everything kept, and under Lightning's own."""
    import pytorch_lightning as pl

    from lightning_plugin.strategy.tiling import SFTStrategy

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = NETWORKS["resnet18 of 4 channels"]()
            self.times: list[float] = []

        def training_step(self, batch: Tensor) -> Tensor:
            return self.net(batch).square().mean()  # type: ignore[no-any-return]

        def on_train_batch_end(self, *_: Any) -> None:
            self.times.append(time.process_time())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    medians = []
    for strategy in (SFTStrategy(budget="8GiB", tile_over="1KiB"), "auto"):
        module = Module()
        images: Any = [torch.randn(3, side, side) for _ in range(steps)]
        data: DataLoader[Any] = DataLoader(images, batch_size=1)
        pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, data)  # fmt: skip
        times = module.times[3:]
        medians.append(1e3 * statistics.median(b - a for a, b in pairwise(times)))
    ours, plain = medians
    return {"side": side, "kept": {"ms": round(ours, 2), "plain ms": round(plain, 2), "ratio": round(ours / plain, 2)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join((*NETWORKS, 'trainer'))}")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.names or (*NETWORKS, "trainer"):
        if name == "trainer":
            found = measure_trainer(options.side, 5 + 2 * options.pairs)
            print(name, found)
            keep_case("host", name, found)
            continue
        for case, found in measure(name, options.side, options.pairs):
            print(case, found)
            keep_case("host", case, found)


if __name__ == "__main__":
    main()
