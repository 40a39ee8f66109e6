"""Parameters with AdamW's states that are larger than the memory of the process, trained under a limit of the system.

    python -m benchmarks.states [--width 1024] [--depth 19] [--steps 3] [--limit 1.5GiB] [--budget 256MiB]

Three processes, one after the other, of a language model in float64. Each has the same limit on the memory that it
allocates (``RLIMIT_DATA``: all but mapped files), set before the model is built. The limit counts addresses, also those
of freed blocks whose pages the engine has given back. Therefore the C library is told to map blocks of a MiB and more
one by one (`LARGE`), so that a freed block is no part of the process. The kernel's high-water mark of resident memory,
mapped files among it, is measured beside.

- "engine": `SFTStrategy`, with parameters and states in files, and the optimizer's step within backward.
- "layers": plain PyTorch with one layer in memory at a time. Each layer has a file of its own, is read for forward and
  again for backward, makes its own step, and is written back. Layers meet in activations only, so this is what plain
  PyTorch computes with the memory for all; it shares no code with the engine.
- "whole": plain PyTorch as everybody writes it, which ends where the memory does.

Losses and all parameters after the last step are compared. Writes the case "states" of benchmarks/results/seeds.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.keep import keep_case
from benchmarks.streamed import Block
from lightning_plugin.units import parse_bytes
from tests.lightning_plugin.planner.peaks import of_status

TOKENS, WORDS, HEADS = 32, 512, 8
RATE = 1e-3
CASES = ("engine", "layers", "whole")
#: Blocks of so many bytes are given back when they are freed.
LARGE = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


class First(nn.Module):
    """Embeddings of words and places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.zeros(TOKENS, width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids[:, 0]) + self.places


class Last(nn.Module):
    """Scores of the next word."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.next = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.next(self.norm(x)).transpose(1, 2)


def layer(place: int, width: int, depth: int) -> nn.Module:
    """One layer without data: of places 0 to depth + 1."""
    with torch.device("meta"):
        return First(width) if place == 0 else Last(width) if place > depth else Block(width, HEADS, causal=True)


class Drawn(Mapping[str, Tensor]):
    """First values of parameters, drawn by their names when they are asked for."""

    def __init__(self, net: nn.Module, prefix: str = "") -> None:
        self.shapes = {prefix + name: p.shape for name, p in net.named_parameters()}

    def __getitem__(self, name: str) -> Tensor:
        seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        shape = self.shapes[name]
        mean = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0  # weights of LayerNorm
        return torch.empty(shape).normal_(mean, 0.02, generator=seeded)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (1, 1, TOKENS), generator=generator) for _ in range(steps)]


def loss_of(scores: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(scores, ids[:, 0].roll(-1, 1))


def engine(width: int, depth: int, steps: int, budget: int, folder: Path) -> dict[str, Any]:
    import pytorch_lightning as pl

    from lightning_plugin import SFTStrategy
    from lightning_plugin.residency.homes import build

    losses: list[float] = []
    seconds: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(layer(i, width, depth) for i in range(depth + 2)))

        def training_step(self, ids: Tensor, place: int) -> Tensor:
            self.began = time.perf_counter()
            return loss_of(self.net(ids), batches(steps)[place])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

        def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
            losses.append(float(outputs["loss"]))
            seconds.append(time.perf_counter() - self.began)

    strategy = SFTStrategy(budget=budget, parameters="disk", disk=str(folder), tile_over=1)
    module = Module()
    strategy.engine.homes.folder = str(folder)
    build(module.net, strategy.engine.homes, "disk", Drawn(module.net))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, **quiet)  # type: ignore[arg-type]
    trainer.fit(module, torch.utils.data.DataLoader(batches(steps), batch_size=None))  # type: ignore[arg-type]
    for name, p in module.net.named_parameters():
        p.detach().numpy().tofile(folder / name)
        strategy.engine.homes.release_pages()
    states = sum(
        t.nbytes for state in trainer.optimizers[0].state.values() for t in state.values() if isinstance(t, Tensor)
    )
    parameters = sum(p.nbytes for p in module.net.parameters())
    return {
        "losses": losses,
        "seconds": seconds,
        "parameter_bytes": parameters,
        "state_bytes": states,
        "peak_bytes": strategy.peak_bytes,
    }


def layers(width: int, depth: int, steps: int, folder: Path) -> dict[str, Any]:
    """Plain PyTorch, layer by layer; at the end the largest difference from the engine's parameters."""

    def load(place: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        net, file = layer(place, width, depth).to_empty(device="cpu"), folder / f"layer {place}"
        saved = torch.load(file) if file.exists() else None
        drawn = Drawn(net, f"{place}.")
        values = saved["net"] if saved else {name: drawn[f"{place}.{name}"] for name, _ in net.named_parameters()}
        net.load_state_dict(values)
        optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
        if saved:
            optimizer.load_state_dict(saved["optimizer"])
        return net, optimizer

    losses: list[float] = []
    seconds: list[float] = []
    for ids in batches(steps):
        began = time.perf_counter()
        inputs: list[Tensor] = [ids]
        for place in range(depth + 1):
            with torch.no_grad():
                inputs.append(load(place)[0](inputs[-1]))
        gradient: Tensor | None = None
        for place in reversed(range(depth + 2)):
            net, optimizer = load(place)
            x = inputs.pop()
            out = net(x.requires_grad_() if place else x)
            if gradient is None:
                out = loss_of(out, ids)
                losses.append(float(out.detach()))
            out.backward(gradient)
            gradient = x.grad
            optimizer.step()
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"layer {place}")
        seconds.append(time.perf_counter() - began)
    differences = [0.0]
    for place in range(depth + 2):
        for name, p in load(place)[0].named_parameters():
            here, there = p.detach().flatten(), torch.from_numpy(np.fromfile(folder / f"{place}.{name}", np.float64))
            differences.append(float((here - there).abs().max() / here.abs().max()))
    return {"losses": losses, "seconds": seconds, "difference": max(differences)}


def whole(width: int, depth: int, steps: int) -> dict[str, Any]:
    """Plain PyTorch as it is written: an optimizer of all parameters. Returns how it ended."""
    try:
        net = nn.Sequential(*(layer(i, width, depth) for i in range(depth + 2))).to_empty(device="cpu")
        drawn = Drawn(net)
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(drawn[name])
        optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
        for ids in batches(steps):
            optimizer.zero_grad()
            loss_of(net(ids), ids).backward()
            optimizer.step()
    except (RuntimeError, MemoryError) as error:
        return {"error": str(error).splitlines()[0]}
    return {"error": ""}


def alone(case: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One case in this process, under the limit."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    limit = parse_bytes(options.limit)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    size = options.width, options.depth, options.steps
    if case == "engine":
        found = engine(*size, parse_bytes(options.budget), folder)
    else:
        found = layers(*size, folder) if case == "layers" else whole(*size)
    return {**found, "process_bytes": of_status("VmHWM")}


def compare(options: argparse.Namespace) -> None:
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            words = [sys.executable, "-m", "benchmarks.states", *sys.argv[1:], "--alone", case, "--folder", folder]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | LARGE)
            found[case] = json.loads(done.stdout.splitlines()[-1])
            print(case, found[case], flush=True)
    mine, theirs = found["engine"], found["layers"]
    keep_case(
        "seeds",
        "states",
        {
            "limit_bytes": parse_bytes(options.limit),
            "budget_bytes": parse_bytes(options.budget),
            "width": options.width,
            "depth": options.depth,
            "steps": options.steps,
            "losses_differ_by": max(abs(a - b) for a, b in zip(mine["losses"], theirs["losses"], strict=True)),
            "parameters_differ_by": theirs["difference"],
            "layers_seconds": theirs["seconds"],
            "layers_process_bytes": theirs["process_bytes"],
            "whole_error": found["whole"]["error"],
            **mine,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=19)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", default="1.5GiB")
    parser.add_argument("--budget", default="256MiB")
    parser.add_argument("--alone", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone is None:
        compare(options)
    else:
        print(json.dumps(alone(options.alone, options, options.folder)), flush=True)


if __name__ == "__main__":
    main()
