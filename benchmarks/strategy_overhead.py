"""What `sft` costs where nothing has to be tiled: steps of one Trainer under it against steps under Lightning's own.

    python -m benchmarks.strategy_overhead [--side 1024] [--pairs 7] [--threads 1]

Two Trainers take turns in one process, step by step, on the same module and the same image, which fits the budget. A
step lasts from one batch to the request for the next, so all of the Trainer's own work counts. The ratio is the median
over pairs, of wall time and of processor time, which other work on the machine disturbs little; the first two steps of
each, which plan and warm up, are not counted. ``dense`` is a tensor in the batch, which is recorded once; ``recorded``
is a `LazyImage`, which is recorded in every step. Writes benchmarks/results/strategy_overhead.json.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.keep import keep_case
from lightning_plugin import LazyImage, SFTStrategy
from tests.zoo import ZOO

#: Steps of each Trainer that are not counted.
WARMING = 2
#: What is aimed at.
TARGET = 1.03


class Classifier(pl.LightningModule):
    """A ResNet-18 in train mode, as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ZOO["resnet18"].published().train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.net(batch["image"]).flatten(1)
        loss = nn.functional.cross_entropy(scores, batch["label"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Turns:
    """A loader that gives a batch when it is its turn, and hands over when the next is asked for."""

    def __init__(self, batch: Any, steps: int) -> None:
        self.batch = batch
        self.steps = steps
        self.turn = threading.Semaphore(0)
        self.other: Turns | None = None
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __len__(self) -> int:
        return self.steps + 1  # the last is not counted: nobody asks for another after it

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            self.turn.acquire()
            wall, cpu = time.perf_counter(), time.process_time()
            yield self.batch
            self.wall.append(time.perf_counter() - wall)
            self.cpu.append(time.process_time() - cpu)
            assert self.other is not None
            self.other.turn.release()


def train(module: pl.LightningModule, strategy: Any, turns: Turns, threads: int) -> None:
    torch.set_num_threads(threads)  # a thread's own
    run = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    run.fit(module, turns)
    assert turns.other is not None
    turns.other.turn.release()


def compare(kind: str, side: int, pairs: int, threads: int) -> dict[str, Any]:
    """Ratios of paired steps."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 3, side, side, generator=generator)
    label = torch.zeros(1, dtype=torch.int64)
    plain = Classifier()
    given = image if kind == "dense" else LazyImage.from_tensor(image)
    sides = [
        (plain, "auto", Turns({"image": image, "label": label}, WARMING + pairs)),
        (copy.deepcopy(plain), SFTStrategy(), Turns({"image": given, "label": label}, WARMING + pairs)),
    ]
    first, second = (turns for _, _, turns in sides)
    first.other, second.other = second, first
    running = [threading.Thread(target=train, args=(*s, threads)) for s in sides]
    for thread in running:
        thread.start()
    first.turn.release()
    for thread in running:
        thread.join()
    return {
        "ratio": median_ratio(second.wall, first.wall),
        "cpu_ratio": median_ratio(second.cpu, first.cpu),
        "plain_seconds": round(statistics.median(first.wall[WARMING:]), 3),
        "sft_seconds": round(statistics.median(second.wall[WARMING:]), 3),
        "pairs": pairs,
        "side": side,
        "target": TARGET,
    }


def median_ratio(ours: list[float], plain: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours[WARMING:], plain[WARMING:], strict=True)), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="dense, recorded (both if none is given)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    torch.set_num_threads(options.threads)
    table = Table("batch", "plain", "sft", "ratio", "ratio of processor time", "target")
    for kind in options.kinds or ("dense", "recorded"):
        found = compare(kind, options.side, options.pairs, options.threads)
        keep_case("strategy_overhead", kind, found)
        seconds = (f"{found[name]:.2f} s" for name in ("plain_seconds", "sft_seconds"))
        table.add_row(kind, *seconds, f"{found['ratio']:.3f}", f"{found['cpu_ratio']:.3f}", f"{TARGET}")
    Console().print(table)


if __name__ == "__main__":
    main()
