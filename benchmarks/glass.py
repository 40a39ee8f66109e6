"""What glass costs: `python -m benchmarks.glass [CASE ...] [--pairs 7] [--side 2048] [--budget 512MiB]`.

A step on an image of which a source knows that 60 or 80 % are one value, against a step on an image of the same size
that is tissue all over, within the same budget; the two take turns. The tissue is one square in the middle, from which
an operator's windows spread it on all sides: a network that sees 435 positions makes a map of its last layers of which
far more than 20 % differ. So it is also said which part of the work cannot be shared by whoever shares: the operations
of all positions that see some tissue, or the border's padding. Writes benchmarks/results/glass.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from benchmarks.keep import keep_case
from benchmarks.peers.works import VALUE, glassy, tissue
from lightning_plugin import LazyImage, TiledModule
from lightning_plugin.boxes import Box
from tests.lightning_plugin.glass import Glass
from tests.zoo.resnet import BasicBlock, ResNet


def slide(side: int, share: float) -> Glass:
    """An image of which a share is tissue, and which knows it."""
    first, last = tissue(side, share)
    return Glass(glassy(side, share), Box((first, first), (last, last)), VALUE)


def resnet18(train: bool) -> nn.Module:
    torch.manual_seed(0)
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes=4).train(train)


CASES = {"frozen": False, "train": True}


def unshared(net: nn.Module, image: Glass) -> float:
    """The part of a forward pass's operations whose positions see tissue, or padding: found by what differs from a map
    that is glass all over."""
    glass = torch.full_like(image.tensor, VALUE)
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
        net(glass)
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
        "seconds": {f"{1 - share:.0%} glass": seconds[share] for share in images},
        "predicted": {f"{1 - share:.0%} glass": tiled[share].plan.seconds for share in images},  # type: ignore[union-attr]
        "times faster": {f"{1 - s:.0%} glass": statistics.median(f[1.0] / f[s] for f in found) for s in shares},
        "at most": {f"{1 - s:.0%} glass": 1 / unshared(net, images[s]) for s in shares},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--budget", default="512MiB")
    parser.add_argument("--tissue", type=float, nargs="+", default=[0.4, 0.2], help="shares that are tissue")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in options.cases or CASES:
        found = measure(case, options.side, options.budget, options.tissue, options.pairs)
        print(found)
        keep_case("glass", f"{case} {options.side}", found)


if __name__ == "__main__":
    main()
