"""The cost of tiny tiles beside their arithmetic: a step of many against the same operators run eagerly on crops.

    python -m benchmarks.small_tiles [--side 1024] [--tiles 16] [--pairs 7] [--width 0.03125]

A frozen ResNet-18 of width 2, so that arithmetic hardly counts, on an image cut into ``tiles`` x ``tiles``; against it
the same network, forward and backward, on as many crops of the tiles' own size. The two take turns; the ratio is the
median over pairs, of processor time with one thread. Crops have no halo and exchange nothing, so they compute less:
where a tile of 16 x 16 reads 115 x 115, most of the ratio is the work of halos. So the same network is measured with
kernels of 1 x 1 too, where a tile computes what a crop does, forward once more. Both are measured with tiles that are
compiled, too, when all kinds of them are. It is also said how many operators are dispatched for one tile and for one
crop. Writes benchmarks/results/small_tiles.json, a case for each network.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.keep import keep_case
from lightning_plugin import LazyImage, TiledModule
from tests.zoo.resnet import BasicBlock, ResNet


class Count(TorchDispatchMode):
    """Counts the operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operators += 1
        return func(*args, **(kwargs or {}))


def resnet(width: float) -> nn.Module:
    return ResNet(BasicBlock, (2, 2, 2, 2), width_mult=width, num_classes=4).eval()


def without_halos(net: nn.Module) -> nn.Module:
    """The same network with kernels of one position."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.weight = nn.Parameter(module.weight.detach().mean((2, 3), keepdim=True))
            module.kernel_size, module.padding = (1, 1), (0, 0)
    return net


def processor(step: Callable[[], None]) -> float:
    begin = time.process_time()
    step()
    return time.process_time() - begin


def operators(step: Callable[[], None]) -> int:
    with Count() as count:
        step()
    return count.operators


def measure(net: nn.Module, side: int, tiles: int, pairs: int) -> dict[str, object]:
    """Steps of both in turn."""
    image = torch.randn(1, 3, side, side)
    crop = torch.randn(1, 3, side // tiles, side // tiles)
    plain, compiled = (TiledModule(net, tiles=(tiles, tiles), compile=how) for how in ("never", "tiles"))

    def ours(tiled: TiledModule = plain) -> None:
        loss: Tensor = tiled(LazyImage(image)).sum()
        loss.backward()

    def by_compiled() -> None:
        ours(compiled)

    def crops() -> None:
        for _ in range(tiles * tiles):
            net(crop).sum().backward()

    for step in (ours, crops, ours, *[by_compiled] * 4):
        step()
    found = [(processor(ours), processor(crops), processor(by_compiled)) for _ in track(range(pairs), "pairs")]
    ratios = [a / b for a, b, _ in found]
    return {
        "side": side,
        "tiles": tiles,
        "seconds": statistics.median(a for a, _, _ in found),
        "seconds of crops": statistics.median(b for _, b, _ in found),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "seconds compiled": statistics.median(c for _, _, c in found),
        "ratio compiled": statistics.median(c / b for _, b, c in found),
        "operators of a tile": round(operators(ours) / tiles**2, 1),
        "operators of a crop": round(operators(crops) / tiles**2, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--tiles", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--width", type=float, default=1 / 32, help="of ResNet-18's 64 channels")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name = f"resnet18 of width {64 * options.width:g}"
    for case, net in (
        (name, resnet(options.width)),
        (f"{name}, kernels of 1 x 1", without_halos(resnet(options.width))),
    ):
        found = measure(net, options.side, options.tiles, options.pairs)
        print(case, found)
        keep_case("small_tiles", case, found)


if __name__ == "__main__":
    main()
