"""Claims of the five papers beside ours: the runs and plans of docs/seeds.md, case by case.

    python -m benchmarks.seeds step darknet19 10240  one real training step within 1 GiB, or --plan of one (SFT)
    python -m benchmarks.seeds sizes vgg16           largest batch at 224², largest image at batch 8 (LR-CNN, Split-CNN)
    python -m benchmarks.seeds point resnet18 batch  the largest size that is planned here under a small budget, run
    python -m benchmarks.seeds volume 1 [--run]      3-D U-Net at 192³, planned within 16 GB, or run within 1 GiB (IBM)
    python -m benchmarks.seeds images 1024           a batch of ResNet-50 at 224², planned within 16 GB (IBM)
    python -m benchmarks.seeds throughput            images a second of ResNet-50 by batch, maps in halves (IBM)
    python -m benchmarks.seeds video                 DarkNet-19 over 300 frames, planned within 12 GB (SCORCH)
    python -m benchmarks.seeds blocks 1001 [--run]   bottleneck blocks, batch 30 at 224² (SCORCH)
    python -m benchmarks.seeds repeated              repeated steps of ResNet-152 beside plain PyTorch (SCORCH)
    python -m benchmarks.seeds figures               what the page says of each case

What is planned is planned by the rates of an A100 with its host, without data; runs are on this machine, on one thread.
Each writes its cases into benchmarks/results/seeds.json; other cases stay.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.against_plain import frozen
from benchmarks.keep import keep_case
from benchmarks.published import POLICIES
from lightning_plugin import BudgetError, TiledModule, make_plan
from lightning_plugin.planner.search.policies import AUTO, Policy
from lightning_plugin.planner.search.search import Search
from lightning_plugin.rules.pooling import PoolOp
from lightning_plugin.units import format_bytes, parse_bytes
from tests.conftest import RESULTS
from tests.lightning_plugin.planner.peaks import CLEAR, of_status, warm_up
from tests.zoo import ZOO
from tests.zoo.resnet import Bottleneck, ResNet
from tests.zoo.unet3d import UNet3D

GIB = 2**30

#: The networks of SFT's experiments: all but the classifier, whose input has one size.
CONVOLUTIONAL: dict[str, Callable[[], nn.Module]] = {
    "vgg16": lambda: ZOO["vgg16_mean"].published(),
    "vgg19": lambda: ZOO["vgg19_max"].published(),
    "darknet19": lambda: ZOO["darknet19"].published(),
}


def measured_step(net: nn.Module, image: Tensor, budget: int, **options: Any) -> dict[str, Any]:
    """One real step with a squared error under a budget: seconds, the ledger's peak, and what the process took beyond
    what it held before."""
    begin = time.process_time()
    plan = make_plan(net, tuple(image.shape), budget=budget, **options)
    planning = time.process_time() - begin
    tiled = TiledModule(net, plan=plan)
    warm_up()
    gc.collect()
    baseline = of_status("VmRSS")
    CLEAR.write_text("5")
    begin, processor = time.perf_counter(), time.process_time()
    out = tiled(image)
    out.square().mean().backward()
    return {
        "budget_bytes": budget,
        "peak_bytes": tiled.peak_bytes,
        "process_bytes": of_status("VmHWM") - baseline,
        "seconds": time.perf_counter() - begin,
        "processor_seconds": time.process_time() - processor,
        "plan_seconds": planning,
        "planned_bytes": plan.peak_bytes,
        "plain_bytes": plan.plain_bytes,
        "disk_bytes": plan.stored_on("disk"),
    }


def behind_poolings(search: Search) -> Iterator[int]:
    """The cuts behind poolings: the smallest maps of each resolution are stored."""
    return (i for i, node in enumerate(search.network.order, 1) if isinstance(node.op, PoolOp))


#: The fastest plans, and plans whose files are small, which recompute more.
PLANS = {"fastest": AUTO, "small": Policy(cuts=behind_poolings)}


def step(name: str, side: int, budget: str, files: str, plan: bool) -> None:
    torch.set_num_threads(1)
    net, shape = CONVOLUTIONAL[name](), (1, 3, side, side)
    about = {"network": name, "side": side, "files": files}
    if plan:
        plan_case(f"planned {name} {side} {files}", net, shape, parse_bytes(budget), "cpu", PLANS[files], **about)
    else:
        run_case(f"step {name} {side}", net, shape, parse_bytes(budget), PLANS[files], **about)


# Sizes that are planned -----------------------------------------------------------------------------------------------

#: Networks with the classifiers of their papers' experiments, in train mode.
CLASSIFIERS = {"vgg16": "vgg16", "vgg19": "vgg19", "resnet18": "resnet18", "resnet50": "resnet50"}
WAYS = ("checkpoint_sequential", "overl-h", "2ps-h", "hmms", "auto")
GB = 10**9
MOST = {"batch": 4096, "side": 16384}
LEAST = {"batch": 1, "side": 32}
#: Sizes are found to one of so many parts.
PARTS = 32


def shape_of(what: str, size: int) -> tuple[int, ...]:
    return (size, 3, 224, 224) if what == "batch" else (8, 3, size, size)


def largest(what: str, fits: Callable[[int], bool], known: int = 0) -> int:
    """The largest batch or side that fits, up to `MOST`; 0 if none does. One of the size ``known`` does."""
    unit, most = LEAST[what], MOST[what]
    if known == most or fits(most):
        return most
    low, high = known, min(most, max(unit, 2 * known))
    while high < most and fits(high):
        low, high = high, min(most, 2 * high)
    while high - low > max(unit, low // PARTS):
        middle = (low + high) // 2 // unit * unit
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def sizes(name: str, budgets: list[int]) -> None:
    """The largest batch at 224² and the largest square image at batch 8, by each way and under each budget."""
    with torch.device("meta"):
        net = ZOO[CLASSIFIERS[name]].published().train()
    before = {what: dict.fromkeys((*WAYS, "plain"), 0) for what in MOST}  # what fits less fits more
    for gb, what in itertools.product(sorted(budgets), MOST):
        fit: dict[str, Callable[[int], bool]] = {way: partial(is_planned, net, what, gb * GB, way) for way in WAYS}
        fit["plain"] = partial(is_held_whole, net, what, gb * GB)
        found = before[what] = {way: largest(what, fits, before[what][way]) for way, fits in fit.items()}
        about = {"network": name, "budget_gb": gb, "what": what, "most": MOST[what]}
        keep_case("seeds", f"sizes {name} {what} {gb}", {**about, **found})


def is_planned(net: nn.Module, what: str, budget: int, policy: str, size: int) -> bool:
    """True if a step can be planned on a device with a host below it."""
    try:
        make_plan(net, shape_of(what, size), budget=budget, device="cuda:a100", policy=POLICIES[policy], disk=False)
    except BudgetError:
        return False
    return True


def is_held_whole(net: nn.Module, what: str, budget: int, size: int) -> bool:
    """True if the step of plain PyTorch fits: a plan with room for all foretells what it holds."""
    return make_plan(net, shape_of(what, size), budget="1000TiB", device="cuda:a100").peak_bytes <= budget


def point(name: str, what: str, budget: str) -> None:
    """Run a step of the largest size that is planned on this machine, whose host's memory is the budget's."""
    torch.set_num_threads(1)
    net, allowed = ZOO[CLASSIFIERS[name]].published().train(), parse_bytes(budget)

    def fits(size: int) -> bool:
        try:
            make_plan(net, shape_of(what, size), budget=allowed, disk=False)
        except BudgetError:
            return False
        return True

    size = largest(what, fits)
    found = measured_step(net, torch.randn(shape_of(what, size)), allowed, disk=False)
    keep_case("seeds", f"point {name} {what}", {"network": name, "what": what, "size": size, **found})


def plan_case(
    case: str,
    net: nn.Module,
    shape: tuple[int, ...],
    budget: int,
    device: str = "cuda:a100",
    policy: Policy = AUTO,
    **about: Any,
) -> None:
    """Plan one step, on a device with a host below it if not on this machine, and keep what the plan says."""
    begin = time.process_time()
    plan = make_plan(net, shape, budget=budget, device=device, policy=policy)
    values = {
        "shape": list(shape),
        "budget_bytes": budget,
        "peak_bytes": plan.peak_bytes,
        "plain_bytes": plan.plain_bytes,
        "disk_bytes": plan.stored_on("disk"),
        "predicted_seconds": plan.seconds,
        "plan_seconds": time.process_time() - begin,
    }
    keep_case("seeds", case, {**about, **values})


def run_case(
    case: str, net: nn.Module, shape: tuple[int, ...], budget: int, policy: Policy = AUTO, **about: Any
) -> None:
    torch.set_num_threads(1)
    found = measured_step(net, torch.randn(shape), budget, policy=policy)
    keep_case("seeds", case, {**about, "shape": list(shape), **found})


# Volumes and films ----------------------------------------------------------------------------------------------------


def volume(batch: int, run: bool) -> None:
    """A 3-D U-Net on four channels at 192³, as of BraTS."""
    shape = (batch, 4, 192, 192, 192)
    with torch.device("cpu" if run else "meta"):
        net = UNet3D(depth=3, in_channels=4, num_classes=4).train()
    about: dict[str, Any] = {"network": "3-D U-Net", "batch": batch}
    if run:
        run_case(f"volume {batch} run", net, shape, GIB, **about)
    else:
        plan_case(f"volume {batch} planned", net, shape, 16 * GB, **about)


def images(batch: int) -> None:
    """A batch of ResNet-50 in train mode."""
    with torch.device("meta"):
        net = ZOO["resnet50"].published().train()
    plan_case(f"images {batch} planned", net, (batch, 3, 224, 224), 16 * GB, network="ResNet-50", batch=batch)


#: How maps that are stored are held: as they are, in half precision on lower tiers, and on the device too.
HALVES: dict[str, Any] = {"float32": False, "half below": True, "half": "device"}
#: IBM's batches at 224²: the largest by compression, by both, and by swapping.
BATCHES = (357, 775, 1024)


def throughput() -> None:
    """Images a second of ResNet-50 in train mode within 16 GB against the batch, by how stored maps are held."""
    with torch.device("meta"):
        net = ZOO["resnet50"].published().train()
    for batch, (name, half) in itertools.product(BATCHES, HALVES.items()):
        plan = make_plan(net, (batch, 3, 224, 224), budget=16 * GB, device="cuda:a100", half=half, disk=False)
        values = {"budget_bytes": 16 * GB, "peak_bytes": plan.peak_bytes, "images_a_second": batch / plan.seconds}
        keep_case("seeds", f"throughput {batch} {name}", {"batch": batch, "maps": name, **values})


def film(frames: int) -> None:
    """DarkNet-19 whose windows span three frames, on frames so large that the first map takes 13.2 GB."""
    side = 576
    with torch.device("meta"):
        net = over_time(ZOO["darknet19"].published().train())
    plan_case("video", net, (1, 3, frames, side, side), 12 * GB, network="DarkNet-19 over time", frames=frames)


class Video(nn.Module):
    """DarkNet-19's stages with windows over time; poolings are of space."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(*(conv_over_time(block.conv) for block in stage)) for stage in net.stages
        )
        self.head = nn.Conv3d(net.classifier.in_channels, net.classifier.out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        for i, stage in enumerate(self.stages):
            x = stage(nn.functional.max_pool3d(x, (1, 2, 2)) if i else x)
        return self.head(x).mean((2, 3, 4))


def over_time(net: nn.Module) -> nn.Module:
    return Video(net)


def conv_over_time(conv: nn.Conv2d) -> nn.Module:
    kernel = conv.kernel_size[0]
    made = nn.Conv3d(conv.in_channels, conv.out_channels, kernel, padding="same", bias=False)
    return nn.Sequential(made, nn.BatchNorm3d(conv.out_channels), nn.LeakyReLU(0.1, inplace=True))


# Depth ----------------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """ResNet's stem, and as many of its bottleneck blocks of 256 channels as make up the layers; BatchNorm is frozen,
    since a statistic of every layer would have to be waited for."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 256, 7, 2, 3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(*(Bottle() for _ in range((layers - 2) // 3)))
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Bottle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(256, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
            nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
            nn.Conv2d(64, 256, 1, bias=False), nn.BatchNorm2d(256),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + 0.1 * self.body(x))


def blocks(layers: int, run: bool) -> None:
    """Bottleneck blocks at 224² and batch 30."""
    with torch.device("cpu" if run else "meta"):
        net = frozen(Deep(layers))
    about: dict[str, Any] = {
        "network": "bottleneck blocks",
        "layers": layers,
        "parameter_bytes": sum(p.nbytes for p in net.parameters()),
    }
    if run:
        run_case(f"blocks {layers} run", net, (30, 3, 224, 224), 2 * GIB, **about)
    else:
        plan_case(f"blocks {layers} planned", net, (30, 3, 224, 224), 12 * GB, **about)


def repeated(pairs: int) -> None:
    """Steps of ResNet-152 in a quarter of plain PyTorch's memory, in turns with plain ones, after a step of each."""
    torch.set_num_threads(1)
    net = frozen(ResNet(Bottleneck, (3, 8, 36, 3)))
    x = torch.randn(4, 3, 224, 224)
    plain_bytes = make_plan(net, tuple(x.shape), budget="1TiB").plain_bytes
    budget = int(2 * sum(p.nbytes for p in net.parameters()) + plain_bytes / 4)
    tiled = TiledModule(net, budget=budget)
    seconds: dict[nn.Module, list[float]] = {net: [], tiled: []}
    for turn in range(pairs + 4):  # from the fourth equal step on, small passes are replayed
        for module in (net, tiled):
            module.zero_grad(set_to_none=True)
            begin = time.process_time()
            module(x).square().mean().backward()
            if turn >= 4:
                seconds[module].append(time.process_time() - begin)
    ratio = statistics.median(t / p for p, t in zip(seconds[net], seconds[tiled], strict=True))
    plain = statistics.median(seconds[net])
    values = {"budget_bytes": budget, "peak_bytes": tiled.peak_bytes, "plain_bytes": plain_bytes}
    about = {"network": "ResNet-152, frozen", "shape": list(x.shape), "pairs": pairs}
    keep_case("seeds", "repeated", {**about, **values, "plain_seconds": plain, "ratio": ratio})


# The page -------------------------------------------------------------------------------------------------------------


def figures() -> dict[str, str]:
    """Return the text of each case that stands on docs/seeds.md."""
    cases = json.loads((RESULTS / "seeds.json").read_text())["cases"]
    return {case: said(case.split()[0], values) for case, values in cases.items()}


def said(kind: str, values: dict[str, Any]) -> str:
    if kind == "step":
        held, seconds = format_bytes(values["peak_bytes"]), values["processor_seconds"]
        return f"{values['side']:,}² ({held} held, {seconds:,.0f} s)"
    if kind == "planned":
        held, stored, seconds = (values[key] for key in ("peak_bytes", "disk_bytes", "predicted_seconds"))
        return (
            f"{values['side']:,}² ({format_bytes(held)}, {stored / GIB:,.0f} GiB of files, {seconds / 60:.0f} minutes)"
        )
    if kind == "sizes":
        most, square = values["most"], "²" if values["what"] == "side" else ""
        ways = (("plain", "plain PyTorch"), ("2ps-h", "2PS-H"), ("overl-h", "OverL-H"), ("auto", "ours"))
        told = (f"{name} {values[way]:,}{square}{' and more' * (values[way] >= most)}" for way, name in ways)
        return f"{values['budget_gb']} GB: {', '.join(told)}"
    if kind == "point":
        size = f"batch of {values['size']:,}" if values["what"] == "batch" else f"side of {values['size']:,}"
        planned, held, more = (format_bytes(values[f"{name}_bytes"]) for name in ("planned", "peak", "process"))
        budget = format_bytes(values["budget_bytes"])
        return f"{size} ({planned} planned and {held} held of {budget}; the process took {more} more)"
    if kind == "throughput":
        maps = {"float32": "float32", "half below": "bfloat16 on the host", "half": "bfloat16 everywhere"}
        return f"batch {values['batch']:,} in {maps[values['maps']]}: {values['images_a_second']:.0f}"
    if kind == "states":
        total = format_bytes(values["parameter_bytes"] + values["state_bytes"])
        limit, most = format_bytes(values["limit_bytes"]), format_bytes(values["process_bytes"])
        differ = f"parameters differ by {values['parameters_differ_by']:.0e} from plain PyTorch's"
        return f"{total} of parameters and states in a process limited to {limit} ({most} at most), {differ}"
    if kind == "repeated":
        return f"{values['ratio']:.2f} times in a quarter of its memory"
    held = f"{values['peak_bytes'] / GB:.1f} of {values['budget_bytes'] / GB:.0f} GB"
    return f"{held}, where plain PyTorch holds {values['plain_bytes'] / GB:,.0f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("step", help="one real training step of a network of SFT's at one side")
    one.add_argument("network", choices=sorted(CONVOLUTIONAL))
    one.add_argument("side", type=int)
    one.add_argument("--budget", default="1GiB")
    one.add_argument("--files", choices=list(PLANS), default="fastest", help="small: stores maps behind poolings only")
    one.add_argument("--plan", action="store_true", help="a plan for this machine, and no run")
    many = commands.add_parser("sizes", help="largest batch at 224², largest image at batch 8")
    many.add_argument("network", choices=sorted(CLASSIFIERS))
    many.add_argument("--gb", type=int, nargs="*", default=[10, 12, 16, 24])
    single = commands.add_parser("point", help="the largest size under a small budget, planned and run")
    single.add_argument("network", choices=sorted(CLASSIFIERS))
    single.add_argument("what", choices=sorted(MOST))
    single.add_argument("--budget", default="512MiB")
    three = commands.add_parser("volume", help="a 3-D U-Net at 192³")
    three.add_argument("batch", type=int)
    batch = commands.add_parser("images", help="a batch of ResNet-50 at 224²")
    batch.add_argument("batch", type=int)
    commands.add_parser("throughput", help="images a second of ResNet-50 against the batch, planned")
    frames = commands.add_parser("video", help="a network on frames of a film")
    frames.add_argument("--frames", type=int, default=300)
    deep = commands.add_parser("blocks", help="bottleneck blocks, batch 30 at 224²")
    deep.add_argument("layers", type=int)
    for command in (three, deep):
        command.add_argument("--run", action="store_true", help="a real step on this machine, in place of a plan")
    pairs = commands.add_parser("repeated", help="repeated steps of ResNet-152")
    pairs.add_argument("--pairs", type=int, default=5)
    commands.add_parser("figures", help="what the page says of each case")
    options = parser.parse_args()
    commanded: dict[str, Callable[[], None]] = {
        "step": lambda: step(options.network, options.side, options.budget, options.files, options.plan),
        "sizes": lambda: sizes(options.network, options.gb),
        "point": lambda: point(options.network, options.what, options.budget),
        "volume": lambda: volume(options.batch, options.run),
        "images": lambda: images(options.batch),
        "throughput": throughput,
        "video": lambda: film(options.frames),
        "blocks": lambda: blocks(options.layers, options.run),
        "repeated": lambda: repeated(options.pairs),
        "figures": lambda: print(*(f"{case}: {text}" for case, text in figures().items()), sep="\n"),
    }
    commanded[options.command]()


if __name__ == "__main__":
    main()
