"""Bags of patches and large batches: what a step holds as they grow, what is planned, and what it costs.

    python -m benchmarks.bags growth [--counts 64 256 1024 4096] [--side 64] [--budget 256MiB]
    python -m benchmarks.bags spellings
    python -m benchmarks.bags planned
    python -m benchmarks.bags batch
    python -m benchmarks.bags contrastive
    python -m benchmarks.bags heads [--patches 10000]
    python -m benchmarks.bags keys [--patches 10000]

- ``growth``: real steps of a vision transformer (width 192, 12 blocks) over more and more patches, under one budget,
  with attention over the bag; the ledger's peak, and seconds a patch (the median of three steps).
- ``spellings``: the peak of one bag, cut out of an image in every way that users write.
- ``planned``: a ViT-L/16 and a ViT-g/14 over patches of 224 x 224, without data.
- ``batch``: a ResNet-18 in train mode over 256 images of 96 x 96, under a sixteenth of plain PyTorch's memory.
- ``contrastive``: two small towers and an InfoNCE loss over 1,024 pairs, under the memory of 64, against gradient
  caching written by hand.
- ``heads``: a plain transformer and a TransMIL-like head (Nyström attention) over 10,000 features of 512, in float32:
  the most that a step holds by the allocator's books, and time, against plain PyTorch, with memory to spare and with
  half of plain's.
- ``keys``: a plain transformer of one layer over the same features, whose mean is the result, where not even its keys
  and values fit the budget: they lie on the disk and are read piece by piece.

Writes benchmarks/results/bags.json, a case for each.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from benchmarks.keep import keep_case
from lightning_plugin import BudgetError, LazyImage, TiledModule, make_plan
from lightning_plugin.units import parse_bytes
from tests.exactness import difference
from tests.lightning_plugin.bags import CUTS
from tests.lightning_plugin.heads import Embedded, TransformerHead, TransMIL
from tests.lightning_plugin.outside import account
from tests.zoo.resnet import BasicBlock, ResNet


class Transformer(nn.Module):
    """A vision transformer: patches of ``patch`` pixels, a class token, pre-normalised blocks."""

    def __init__(self, width: int, heads: int, depth: int, hidden: int, patch: int, side: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.zeros(1, 1 + (side // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, heads, hidden, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1) + self.place
        return self.blocks(tokens)[:, 0]  # type: ignore[no-any-return]


class Pooled(nn.Module):
    """An encoder of patches, and gated attention over the bag."""

    def __init__(self, encoder: nn.Module, width: int, classes: int = 2) -> None:
        super().__init__()
        self.encoder = encoder
        self.score = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 1))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        found = self.encoder(x)
        return self.head((torch.softmax(self.score(found), 0) * found).sum(0, keepdim=True))  # type: ignore[no-any-return]


def growth(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    net = Pooled(Transformer(192, 3, 12, 768, 16, options.side), 192)
    rows = []
    for count in track(options.counts, "patches"):
        tiled = TiledModule(net, budget=options.budget)
        image = torch.rand(count, 3, options.side, options.side)

        def step(tiled: TiledModule = tiled, image: Tensor = image) -> None:
            net.zero_grad()
            tiled(LazyImage(image)).sum().backward()

        step()  # plans
        times = []
        for _ in range(3):
            begin = time.process_time()
            step()
            times.append(time.process_time() - begin)
        seconds = statistics.median(times)
        plan = make_plan(net, tuple(image.shape), budget="1TiB")
        rows.append(
            {
                "patches": count,
                "budget": parse_bytes(options.budget),
                "peak_bytes": tiled.peak_bytes,
                "plain_bytes": plan.forecast.plain_bytes,
                "seconds": round(seconds, 2),
                "seconds_a_patch": seconds / count,
            }
        )
        print(rows[-1], flush=True)
    keep_case("bags", "growth", {"side": options.side, "network": "ViT of width 192, 12 blocks, 16 x 16", "rows": rows})


def spellings(options: argparse.Namespace) -> None:
    """One bag of 16 x 12 patches of 32 x 32, cut in each way that cuts all of them."""
    rows = {}
    for cut in CUTS:
        if cut.__name__ in ("whole", "by_overlap", "by_numbers", "by_mask"):
            continue

        class Cut(nn.Module):
            def __init__(self, cut: Any = cut) -> None:
                super().__init__()
                self.cut = cut
                self.rest = Pooled(Transformer(64, 4, 3, 256, 8, 32), 64)

            def forward(self, x: Tensor) -> Tensor:
                return self.rest(self.cut(x, 32))  # type: ignore[no-any-return]

        torch.manual_seed(0)
        tiled = TiledModule(Cut(), budget="24MiB")
        begin = time.process_time()
        tiled(LazyImage(torch.rand(1, 3, 512, 384))).sum().backward()
        rows[cut.__name__] = {"peak_bytes": tiled.peak_bytes, "seconds_with_planning": time.process_time() - begin}
        print(cut.__name__, rows[cut.__name__], flush=True)
    keep_case("bags", "spellings", {"rows": rows})


#: A name, width, heads, blocks, the width inside a block, patch size, patches, and the budget.
PLANNED = (
    ("ViT-L/16", 1024, 16, 24, 4096, 16, 10_000, "11GiB"),
    ("ViT-L/16", 1024, 16, 24, 4096, 16, 10_000, "16GiB"),
    ("ViT-L/16", 1024, 16, 24, 4096, 16, 45_680, "24GiB"),
    ("ViT-g/14", 1408, 16, 40, 6144, 14, 10_000, "24GiB"),
)


def planned(options: argparse.Namespace) -> None:
    """AdamW's two moments are taken off the budget, which plans for parameters and gradients."""
    torch.set_num_threads(1)
    rows = []
    for name, width, heads, depth, hidden, patch, count, budget in PLANNED:
        with torch.device("meta"):
            net = Pooled(Transformer(width, heads, depth, hidden, patch, 224), width)
        moments = 2 * sum(p.numel() * p.element_size() for p in net.parameters())
        left = parse_bytes(budget) - moments
        begin = time.process_time()
        plan = make_plan(net, (count, 3, 224, 224), budget=left, device="cuda:a100")
        rows.append(
            {
                "network": name,
                "patches": count,
                "budget": parse_bytes(budget),
                "moments_bytes": moments,
                "peak_bytes": plan.peak_bytes + moments,
                "plain_bytes": plan.forecast.plain_bytes,
                "barriers": list(plan.barriers),
                "segments": len(plan.segments),
                "tiles": plan.segments[0].backward.tiles,
                "host_bytes": sum(s.forecast.stored_bytes for s in plan.segments if s.tier != "device"),
                "planning_seconds": round(time.process_time() - begin, 2),
            }
        )
        print(rows[-1], flush=True)
    keep_case("bags", "planned", {"rows": rows})


def step_of(net: nn.Module, image: Callable[[], Any], loss: Callable[[Tensor], Tensor]) -> tuple[float, Tensor]:
    begin = time.process_time()
    value = loss(net(image()))
    value.backward()
    return time.process_time() - begin, value.detach()


def worst_gradient(one: nn.Module, other: nn.Module) -> float:
    grads = {n: p.grad for n, p in one.named_parameters() if p.grad is not None}
    floor = 1e-3 * max(float(g.abs().max()) for g in grads.values())
    others = dict(other.named_parameters())
    return max(difference(others[n].grad, g, floor) for n, g in grads.items())  # type: ignore[arg-type]


def batch(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    plain = ResNet(BasicBlock, (2, 2, 2, 2), width_mult=0.25, num_classes=5).double().train()
    net = copy.deepcopy(plain)
    image, weight = torch.randn(256, 3, 96, 96, dtype=torch.float64), torch.randn(256, 5, dtype=torch.float64)
    fixed = 2 * sum(p.numel() * p.element_size() for p in net.parameters())
    whole = make_plan(net.float(), (256, 3, 96, 96), budget="1TiB").forecast.plain_bytes * 2
    net.double()
    budget = whole // 16 + fixed
    tiled = TiledModule(net, budget=budget)
    seconds, _ = step_of(plain, lambda: image, lambda out: (out * weight).sum())
    step_of(tiled, lambda: LazyImage(image), lambda out: (out * weight).sum())
    net.zero_grad()
    net.load_state_dict(plain.state_dict())  # running statistics count steps; gradients do not depend on them
    ours, _ = step_of(tiled, lambda: LazyImage(image), lambda out: (out * weight).sum())
    row = {
        "plain_bytes": whole,
        "budget": budget,
        "peak_bytes": tiled.peak_bytes,
        "error": worst_gradient(plain, net),
        "seconds_plain": seconds,
        "seconds": ours,
    }
    print(row)
    keep_case("bags", "batch of 256, ResNet-18 of width 16, 96 x 96", row)


class Towers(nn.Module):
    """Two towers; a batch holds both views of each pair, side by side in channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = tower(), tower()

    def forward(self, x: Tensor) -> Tensor:
        left = nn.functional.normalize(self.one(x[:, :3]), dim=1)
        right = nn.functional.normalize(self.other(x[:, 3:]), dim=1)
        return left @ right.t() / 0.1


def tower() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 24),
    )  # fmt: skip


def info_nce(scores: Tensor) -> Tensor:
    target = torch.arange(len(scores), device=scores.device)
    both = nn.functional.cross_entropy(scores, target) + nn.functional.cross_entropy(scores.t(), target)
    return both / 2


def cached(net: Towers, image: Tensor, size: int) -> Tensor:
    """Gradient caching by hand: features without grad, their gradients, then each chunk once more with grad."""
    with torch.no_grad():
        left = torch.cat([net.one(c[:, :3]) for c in image.split(size)])
        right = torch.cat([net.other(c[:, 3:]) for c in image.split(size)])
    left.requires_grad_()
    right.requires_grad_()
    normalize = nn.functional.normalize
    loss = info_nce(normalize(left, dim=1) @ normalize(right, dim=1).t() / 0.1)
    loss.backward()
    assert left.grad is not None and right.grad is not None
    for chunk, a, b in zip(image.split(size), left.grad.split(size), right.grad.split(size), strict=True):
        torch.autograd.backward([net.one(chunk[:, :3]), net.other(chunk[:, 3:])], [a, b])
    return loss.detach()


def contrastive(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    plain = Towers().double()
    ours, hand = copy.deepcopy(plain), copy.deepcopy(plain)
    image = torch.randn(1024, 6, 48, 48, dtype=torch.float64)
    few = make_plan(copy.deepcopy(plain).float(), (64, 6, 48, 48), budget="1TiB").forecast.plain_bytes * 2
    scores = 6 * 1024 * 1024 * 8  # the matrix of all pairs and what its loss keeps, of whatever way
    tiled = TiledModule(ours, budget=few + scores)
    seconds, expected = step_of(plain, lambda: image, info_nce)
    step_of(tiled, lambda: LazyImage(image), info_nce)
    ours.zero_grad()
    mine, found = step_of(tiled, lambda: LazyImage(image), info_nce)
    begin = time.process_time()
    other = cached(hand, image, 64)
    by_hand = time.process_time() - begin
    row = {
        "plain_bytes_of_64": few,
        "budget": few + scores,
        "peak_bytes": tiled.peak_bytes,
        "seconds": {"plain": seconds, "tiled": mine, "gradient caching": by_hand},
        "error": {"tiled": worst_gradient(plain, ours), "gradient caching": worst_gradient(plain, hand)},
        "loss_error": {
            "tiled": difference(found, expected),
            "gradient caching": difference(other, expected),
        },
    }
    print(row)
    keep_case("bags", "contrastive, 1024 pairs", row)


def lean(net: nn.Module, image: Tensor, budget: int) -> TiledModule:
    """The network under a budget, after its first step; under the smallest that works, where that is more."""
    tiled = TiledModule(net, budget=budget)
    try:
        whole_step(tiled, image)
    except BudgetError as error:
        tiled = TiledModule(net, budget=int(1.02 * error.smallest))
        whole_step(tiled, image)
    net.zero_grad()
    return tiled


def heads(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rows = []
    image = torch.randn(options.patches, 3, 4, 4)
    for name, head in (
        ("transformer, 2 layers", lambda: TransformerHead(512, 256, 4, 2)),
        ("TransMIL, 256 landmarks", lambda: TransMIL(512, 256, 8, 256)),
    ):
        torch.manual_seed(0)
        plain = Embedded(3, 4, 512, head())
        whole = account(partial(whole_step, plain, image), plain).held
        for label, budget in (("to spare", 1 << 36), ("half of plain's, or the least that works", whole // 2)):
            net = copy.deepcopy(plain)
            tiled = lean(net, image, budget)
            held = account(partial(whole_step, tiled, image), net).held
            pairs = []
            for _ in track(range(options.pairs), f"{name}, {label}"):
                plain.zero_grad()
                net.zero_grad()
                pairs.append([step_of(one, partial(given, one, image), torch.sum)[0] for one in (plain, tiled)])
                error = worst_gradient(plain, net)
            rows.append(
                {
                    "head": name,
                    "memory": label,
                    "plain_bytes": whole,
                    "bytes": held,
                    "ledger_bytes": tiled.peak_bytes,
                    "error": error,
                    "seconds_plain": statistics.median(theirs for theirs, _ in pairs),
                    "time_over_plain": statistics.median(mine / theirs for theirs, mine in pairs),
                }
            )
            print(rows[-1], flush=True)
    keep_case("bags", f"heads over {options.patches} features", {"pairs": options.pairs, "rows": rows})


class Averaged(TransformerHead):
    """The same, over the mean of all tokens: every query counts."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token, self.project(x).unsqueeze(0)], 1)
        return self.head(self.layers(tokens).mean(1))  # type: ignore[no-any-return]


def keys(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    image, width = torch.randn(options.patches, 3, 4, 4), 256
    plain = Embedded(3, 4, 512, Averaged(512, width, 4, 1))
    whole = account(partial(whole_step, plain, image), plain).held
    fixed = 2 * sum(p.numel() * p.element_size() for p in plain.parameters())
    size = 2 * options.patches * width * 4
    rows = []
    for label, part in (("four times their size", 4.0), ("their size", 1.0), ("half of it", 0.5)):
        net = copy.deepcopy(plain)
        tiled = TiledModule(net, budget=fixed + int(part * size), disk=True)
        whole_step(tiled, image)
        pairs = []
        for _ in track(range(options.pairs), label):
            plain.zero_grad()
            net.zero_grad()
            pairs.append([step_of(one, partial(given, one, image), torch.sum)[0] for one in (plain, tiled)])
        assert tiled.plan is not None
        rows.append(
            {
                "memory beside parameters": label,
                "keys_and_values_bytes": size,
                "parameters_and_gradients_bytes": fixed,
                "plain_bytes": whole,
                "budget": fixed + int(part * size),
                "ledger_bytes": tiled.peak_bytes,
                "pieces": max(s.pieces for s in tiled.plan.segments),
                "error": worst_gradient(plain, net),
                "time_over_plain": statistics.median(mine / theirs for theirs, mine in pairs),
            }
        )
        print(rows[-1], flush=True)
    keep_case("bags", f"keys of {options.patches} features", {"pairs": options.pairs, "rows": rows})


def given(net: nn.Module, image: Tensor) -> Tensor:
    """The image as a network takes it."""
    return LazyImage(image) if isinstance(net, TiledModule) else image


def whole_step(net: nn.Module, image: Tensor) -> None:
    net.zero_grad()
    net(given(net, image)).sum().backward()


PARTS = {f.__name__: f for f in (growth, spellings, planned, batch, contrastive, heads, keys)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--counts", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--budget", default="256MiB")
    parser.add_argument("--patches", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
