"""The cost of background: `python -m benchmarks.background [CASE ...] [--pairs 7] [--side 2048] [--budget 512MiB]`.

A step on an image of which a source knows that 60 or 80 % are one value, against a step on an image of the same size
that is tissue all over, within the same budget; the two take turns. The tissue is one square in the middle, from which
an operator's windows spread it on all sides: a network that sees 435 positions makes a map of its last layers of which
far more than 20 % differ. So it is also said which part of the work cannot be shared by whoever shares: the operations
of all positions that see some tissue, or the border's padding. `padded` gives the same images as tensors, which
are compared once a step, and once more without looking at them; `stored` counts the bytes of the disk tier, with and
without finding a tile in another that is the same. Plans go by rates that are calibrated before. Writes
benchmarks/results/background.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from rich.progress import track
from torch import Tensor, nn

from benchmarks.calibrated import RATES, calibrated
from benchmarks.keep import keep_case
from benchmarks.peers.works import VALUE, background_image, tissue
from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.boxes import Box
from lightning_plugin.constants import MIN_CELL_SIDE, Constants
from lightning_plugin.layout import Layout
from lightning_plugin.residency.disk import DiskFile, UnnamedFile
from tests.lightning_plugin.background import Background
from tests.zoo.resnet import BasicBlock, ResNet


def slide(side: int, share: float) -> Background:
    """An image of which a share is tissue, and which knows it."""
    first, last = tissue(side, share)
    return Background(background_image(side, share), Box((first, first), (last, last)), VALUE)


def resnet18(train: bool) -> nn.Module:
    torch.manual_seed(0)
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes=4).train(train)


#: Networks whose BatchNorm is in train mode, or not.
CASES = {"frozen": False, "train": True}
#: What the disk tier is measured with: a side, a budget, and the share of tissue.
STORED = 2048, "192MiB", 0.2
ALL = (*CASES, "padded", "stored")


def unshared(net: nn.Module, image: Background) -> float:
    """The part of a forward pass's operations whose positions see tissue, or padding: found by what differs from a map
    that is background all over."""
    background = torch.full_like(image.tensor, VALUE)
    work = {"all": 0.0, "unshared": 0.0}
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        seen.append(out)

    handles = [m.register_forward_hook(hook) for m in net.modules() if isinstance(m, nn.Conv2d)]
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    mode = net.training
    with torch.no_grad():
        net.eval()(image.tensor)
        ours, seen = [*seen], []
        net(background)
    net.train(mode)
    for handle in handles:
        handle.remove()
    for conv, a, b in zip(convs, ours, seen, strict=True):
        middle = b[..., b.shape[2] // 8 : b.shape[2] // 8 + 1, b.shape[3] // 8 : b.shape[3] // 8 + 1]
        flops = a.shape[1] * a.shape[2] * a.shape[3] * conv.in_channels * math.prod(conv.kernel_size)
        differs = ((a - middle).abs().amax((0, 1)) > 1e-4 * float(middle.abs().amax())).double().mean()
        work["all"] += flops
        work["unshared"] += flops * float(differs)
    return work["unshared"] / work["all"]


def measure(case: str, side: int, budget: str, shares: list[float], pairs: int) -> dict[str, Any]:
    net = resnet18(CASES[case])
    images = {share: slide(side, share) for share in (1.0, *shares)}
    tiled = {share: TiledModule(net, budget=budget) for share in images}

    def step(share: float) -> float:
        """Processor seconds: waiting for a processor that others have is not the step's."""
        net.zero_grad()
        begin = time.process_time()
        tiled[share](LazyImage(images[share])).square().sum().backward()
        return time.process_time() - begin

    for share in images:
        step(share)
        print(f"tissue {share:.0%}\n{tiled[share].plan}")
    found = [{share: step(share) for share in images} for _ in track(range(pairs), case)]
    seconds = {share: statistics.median(f[share] for f in found) for share in images}
    return {
        "side": side,
        "budget": budget,
        "pairs": pairs,
        "seconds": {f"{1 - share:.0%} background": seconds[share] for share in images},
        "predicted": {f"{1 - share:.0%} background": tiled[share].plan.seconds for share in images},  # type: ignore[union-attr]
        "times faster": {f"{1 - s:.0%} background": statistics.median(f[1.0] / f[s] for f in found) for s in shares},
        "at most": {f"{1 - s:.0%} background": 1 / unshared(net, images[s]) for s in shares},
    }


def padded(side: int, budget: str, shares: list[float], pairs: int) -> dict[str, Any]:
    """Images that lie in memory: compared, and not looked at."""
    net = resnet18(False)
    ways = [(share, looks) for share in shares for looks in (True, False)]
    tiled = {way: TiledModule(net, budget=budget) for way in ways}
    images = {share: slide(side, share).tensor for share in shares}

    def step(way: tuple[float, bool]) -> float:
        net.zero_grad()
        looking = nullcontext() if way[1] else patch.object(Constants, "from_tensor", lambda *_: None)
        begin = time.process_time()
        with looking:
            tiled[way](LazyImage.from_tensor(images[way[0]])).square().sum().backward()
        return time.process_time() - begin

    for way in ways:
        step(way)
    found = [{way: step(way) for way in ways} for _ in track(range(pairs), "padded")]
    layout = Layout.channels_first((1, 3, side, side), 1)
    names = {way: f"{1 - way[0]:.0%} background{'' if way[1] else ', not looked at'}" for way in ways}
    begin = time.process_time()
    Constants.from_tensor(layout, images[shares[0]], [MIN_CELL_SIDE] * 2)
    return {
        "side": side,
        "budget": budget,
        "pairs": pairs,
        "seconds": {names[way]: statistics.median(f[way] for f in found) for way in ways},
        "predicted": {names[way]: tiled[way].plan.seconds for way in ways},  # type: ignore[union-attr]
        "seconds of looking": time.process_time() - begin,
    }


def stored() -> dict[str, Any]:
    """The bytes of maps that a step writes to the disk tier and reads from it."""
    side, budget, share = STORED
    net, image, found = resnet18(False), slide(side, share), {}
    tiled = TiledModule(net, budget=budget)
    for finds in (None, True, False):  # the first step makes the plan
        net.zero_grad()
        moved = {"written": 0, "read": 0}

        def counted(name: str, move: Any, moved: dict[str, int] = moved) -> Any:
            def count(file: UnnamedFile, part: memoryview, offset: int) -> None:
                moved[name] += part.nbytes if file.noun == "a map" else 0
                move(file, part, offset)

            return patch.object(UnnamedFile, "write" if name == "written" else "read", count)

        finding = nullcontext() if finds is not False else patch.object(DiskFile, "numbered", Never(), create=True)
        with counted("written", UnnamedFile.write), counted("read", UnnamedFile.read), finding:
            begin = time.process_time()
            tiled(LazyImage(image)).square().sum().backward()
            seconds = time.process_time() - begin
        found["found" if finds else "written again"] = {**moved, "seconds": seconds}
    print(tiled.plan)
    return {"side": side, "budget": budget, "background": 1 - share, **found}


class Never:
    """Numbers that no map on the disk has."""

    def __get__(self, owner: Any, kind: Any) -> None:
        return

    def __set__(self, owner: Any, value: Any) -> None:
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(ALL)}; default: all")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--budget", default="512MiB")
    parser.add_argument("--tissue", type=float, nargs="+", default=[0.4, 0.2], help="shares that are tissue")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with calibrated():
        for case in options.cases or ALL:
            if case == "stored":
                found = stored()
            elif case == "padded":
                found = padded(options.side, options.budget, options.tissue, options.pairs)
            else:
                found = measure(case, options.side, options.budget, options.tissue, options.pairs)
            print(found)
            keep_case("background", f"{case} {found['side']}", {**found, "rates": RATES})


if __name__ == "__main__":
    main()
