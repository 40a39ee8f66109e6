"""Parameters that live below the device: training against plain PyTorch, and plans for networks that fit no card.

    python -m benchmarks.streamed train [--tier host] [--width 768] [--depth 16] [--tokens 192] [--steps 20]
    python -m benchmarks.streamed vit [--patches 8]
    python -m benchmarks.streamed plans

``train``: a language model of causal attention, whose parameters, gradients and AdamW's state are eight times the
budget, beside the same model trained by plain PyTorch; steps take turns, losses are compared, in float64, the ratio of
seconds is the median over steps, with one thread. On a CPU the host's memory is the device's: the tier is memory that
the ledger does not count, and copies are copies. For the disk the bandwidth of its folder is measured beside.
``vit``: ViT-L/16 on a bag of patches with AdamW, under a budget smaller than its parameters.
``plans``: GPT-3 and ViT-g on a card of 11 GiB, without data. Writes benchmarks/results/streamed.json, case by case.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from benchmarks.keep import keep_case
from lightning_plugin import LazyImage, Plan, TiledModule, make_plan, materialize
from lightning_plugin.options import HomeTier

MIB = 2**20
GIB = 2**30


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        parts = self.qkv(self.first(x)).reshape(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(found.transpose(1, 2).reshape(n, t, width))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Language(nn.Module):
    """A language model on (N, 1, tokens)."""

    def __init__(self, width: int, depth: int, tokens: int, words: int = 512, heads: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.Sequential(*(Block(width, heads, True) for _ in range(depth)))
        self.norm, self.next = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.next(self.norm(self.blocks(self.words(ids[:, 0]) + self.places))).transpose(1, 2)


class Vision(nn.Module):
    """A vision transformer on a bag of patches (K, 3, side, side), and a classifier of the bag's mean."""

    def __init__(self, width: int, depth: int, heads: int, patch: int, side: int = 224, classes: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(tokens)).mean(1).mean(0))


def bytes_of(net: nn.Module) -> int:
    return sum(p.nbytes for p in net.parameters())


def seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def train(tier: HomeTier, width: int, depth: int, tokens: int, steps: int) -> dict[str, Any]:
    """Both networks in turn."""
    torch.manual_seed(0)
    plain = Language(width, depth, tokens).double()
    net = copy.deepcopy(plain)
    budget = 4 * bytes_of(net) // 8
    tiled = TiledModule(net, budget=budget, parameters=tier)
    losses: dict[str, list[float]] = {"plain": [], "streamed": []}
    times: dict[str, list[float]] = {"plain": [], "streamed": []}

    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-3) for name, m in (("plain", plain), ("streamed", net))}

    def step(name: str, ids: Tensor) -> None:
        target = ids[:, 0].roll(-1, 1)
        optimizers[name].zero_grad()
        if name == "plain":
            loss = F.cross_entropy(plain(ids), target)
        else:
            loss = materialize(F.cross_entropy(tiled(LazyImage.from_tensor(ids)), target))
        loss.backward()
        optimizers[name].step()
        losses[name].append(float(loss.detach()))

    for _ in track(range(steps), description=f"training, {tier}"):
        ids = torch.randint(0, 512, (1, 1, tokens))
        for name in times:
            times[name].append(seconds(partial(step, name, ids)))
    plan = tiled.plan
    assert plan is not None
    pairs = list(zip(times["streamed"][1:], times["plain"][1:], strict=True))  # the first step plans
    return {
        "parameters MiB": bytes_of(net) / MIB,
        "budget MiB": budget / MIB,
        "peak MiB": tiled.peak_bytes / MIB,
        "planned MiB": plan.peak_bytes / MIB,
        "streamed MiB": plan.forecast.streamed_bytes / MIB,
        "traffic MiB a step": plan.forecast.traffic_bytes / MIB,
        "recompute": plan.recompute,
        "steps": steps,
        "largest difference of losses": max(
            abs(a - b) / abs(a) for a, b in zip(losses["plain"], losses["streamed"], strict=True)
        ),
        "plain seconds": statistics.median(times["plain"]),
        "streamed seconds": statistics.median(times["streamed"][1:]),
        "speed of plain": statistics.median(there / here for here, there in pairs),
        **({} if tier == "host" else {"disk MiB a second": bandwidth()}),
    }


def bandwidth(size: int = 256 * MIB) -> float:
    """Bytes a second read from the folder of temporary files, past the system's cache where it allows that."""
    data = torch.zeros(size, dtype=torch.uint8).numpy()
    with tempfile.TemporaryFile() as file:
        file.write(data.tobytes())
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        took = seconds(lambda: file.readinto(data))  # type: ignore[arg-type, return-value]
    return size / MIB / took


def vit(patches: int) -> dict[str, Any]:
    """A step of ViT-L/16 with AdamW, and plain PyTorch's gradients of the same bag."""
    torch.manual_seed(0)
    net = Vision(1024, 24, 16, 16)
    plain = copy.deepcopy(net)
    bag = torch.randn(patches, 3, 224, 224)
    budget = int(0.9 * bytes_of(net))
    tiled = TiledModule(net, budget=budget, parameters="host")

    def ours() -> None:
        F.cross_entropy(tiled(bag)[None], torch.tensor([1])).backward()

    def whole() -> None:
        F.cross_entropy(plain(bag)[None], torch.tensor([1])).backward()

    first, again, theirs = seconds(ours), 0.0, seconds(whole)
    grads = [(p.grad, q.grad) for p, q in zip(net.parameters(), plain.parameters(), strict=True)]
    largest = max(float(q.abs().max()) for _, q in grads if q is not None)
    error = max(
        float((g - q).abs().max()) / max(float(q.abs().max()), 1e-3 * largest)
        for g, q in grads
        if g is not None and q is not None
    )
    torch.optim.AdamW(net.parameters(), lr=1e-4).step()
    net.zero_grad()
    again = seconds(ours)
    plan = tiled.plan
    assert plan is not None
    return {
        "patches": patches,
        "parameters MiB": bytes_of(net) / MIB,
        "budget MiB": budget / MIB,
        "peak MiB": tiled.peak_bytes / MIB,
        "streamed MiB": plan.forecast.streamed_bytes / MIB,
        "error of gradients, float32": error,
        "plain seconds": theirs,
        "first step with its plan, seconds": first,
        "step seconds": again,
        "recompute": plan.recompute,
    }


def described(plan: Plan, net: nn.Module, took: float) -> dict[str, Any]:
    return {
        "parameters": sum(p.numel() for p in net.parameters()),
        "peak GiB": plan.peak_bytes / GIB,
        "streamed GiB": plan.forecast.streamed_bytes / GIB,
        "on the host": len(plan.on_host),
        "on the disk": len(plan.on_disk),
        "traffic GiB a step": plan.forecast.traffic_bytes / GIB,
        "predicted seconds a step": plan.seconds,
        "recompute": plan.recompute,
        "planning seconds": took,
    }


def plans() -> dict[str, Any]:
    """Plans of networks that fit no card, for parameters in half precision's place: float32 throughout."""
    found: dict[str, Any] = {}
    cases: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
        **{
            f"GPT-3 175B, 1 x 2,048 tokens, bfloat16, {optimizer}": (
                lambda: Language(12288, 96, 2048, words=50257, heads=96).bfloat16(),
                (1, 1, 2048),
                {"host_budget": "768GiB", "dtype": torch.int64, "chains": "always", "optimizer": optimizer},
            )
            for optimizer in ("sgd", "adamw")
        },
        "ViT-g/14, a bag of 256 patches, float32": (
            lambda: Vision(1408, 40, 16, 14),
            (256, 3, 224, 224),
            {"host_budget": "64GiB", "optimizer": "adamw", "chains": "always"},
        ),
    }
    for name, (make, shape, options) in cases.items():
        with torch.device("meta"):
            net = make()
        begin = time.process_time()
        plan = make_plan(net, shape, budget="11GiB", device="cuda:rtx2080ti", **options)
        found[name] = described(plan, net, time.process_time() - begin)
        print(name, found[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "vit", "plans"])
    parser.add_argument("--tier", choices=["host", "disk"], default="host")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--patches", type=int, default=8)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "train":
        found = train(asked.tier, asked.width, asked.depth, asked.tokens, asked.steps)
        keep_case("streamed", f"train, {asked.tier}", found)
    elif asked.what == "vit":
        keep_case("streamed", "vit", found := vit(asked.patches))
    else:
        found = plans()
        for name, case in found.items():
            keep_case("streamed", name, case)
    print(found)


if __name__ == "__main__":
    main()
