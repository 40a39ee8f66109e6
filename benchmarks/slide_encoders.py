"""Published slide encoders on 10,000 patches under 11 GiB: memory and time beside their arithmetic; random weights.

    python -m benchmarks.slide_encoders steps [--only titan prism ...]
    python -m benchmarks.slide_encoders heads [--only titan prism ...]
    python -m benchmarks.slide_encoders together
    python -m benchmarks.slide_encoders planned [--only titan prism ...]

- ``steps``: a real step of each head, forward and backward, on features of 10,000 patches side by side, on one core in
  float32; the ledger's peak, the process's, processor seconds, and those of the head's multiplications alone at the
  rate of a product of two matrices of 2,048.
- ``heads``: the same steps, planned with AdamW at an A100's rates.
- ``together``: a real step of a small encoder of patches and TITAN behind it, on 10,000 patches of 32 x 32.
- ``planned``: a step of AdamW of the published encoder of patches together with the slide encoder on 10,000 patches, at
  an A100's rates, within 24 GiB and 80 GiB.

Writes benchmarks/results/slide_encoders.json, a case for each encoder.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tests.torchvision_stub  # noqa: F401 (timm imports torchvision)
from benchmarks.keep import keep_case
from lightning_plugin import BudgetError, LazyImage, TiledModule, make_plan
from wsi_trainer.fit.plan import step_of
from wsi_trainer.models import FrozenFeatures, PatchEncoder, ResNet, SlideClassifier, Titan
from wsi_trainer.models.batch import side_by_side
from wsi_trainer.models.encoders import encoder_named
from wsi_trainer.models.slide_encoders.published import SLIDE_ENCODERS, SlideEncoder, slide_encoder_named

PATCHES, BUDGET = 10_000, "11GiB"
SIX = [entry.name for entry in SLIDE_ENCODERS if entry.name.partition("-")[2] == ""]
"""One of each architecture."""


def named(name: str) -> SlideEncoder:
    entry = slide_encoder_named(name)
    assert entry is not None
    return entry


def multiplications(entry: SlideEncoder) -> int:
    """Floating point operations of products of matrices in a step, forward and backward."""
    with torch.device("meta"):
        model = SlideClassifier(backbone=FrozenFeatures(entry.channels), head=entry.head)
        features = torch.empty(1, entry.channels, PATCHES, 1)
    counter = FlopCounterMode(display=False)
    step = step_of(model)
    with counter:
        step(features).sum().backward()
    return int(counter.get_total_flops())


def rate() -> float:
    """Operations a second of a product of two matrices on this core, the best of some."""
    a, best = torch.randn(2048, 2048), 0.0
    for _ in range(5):
        begin = time.process_time()
        a @ a
        best = max(best, 2 * 2048**3 / (time.process_time() - begin))
    return best


def measured(model: SlideClassifier, image: Tensor) -> dict[str, float]:
    """Processor seconds of a step after its plan is made, and what it held."""
    torch.manual_seed(0)
    tiled = TiledModule(model, budget=BUDGET)
    begin = time.process_time()
    loss = model.task.loss(tiled(LazyImage(image), places=side_by_side(PATCHES)), torch.tensor([1]))
    loss.backward()
    seconds = time.process_time() - begin
    assert tiled.plan is not None and loss.isfinite()
    return {
        "seconds_with_planning": round(seconds, 1),
        "peak_bytes": tiled.peak_bytes,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "plain_bytes": tiled.plan.plain_bytes,
        "planned_bytes": tiled.plan.peak_bytes,
    }


def one_step(name: str) -> None:
    """One head, in a process of its own."""
    torch.set_num_threads(1)
    entry = named(name)
    operations, speed = multiplications(entry), rate()
    model = SlideClassifier(backbone=FrozenFeatures(entry.channels), head=entry.head)
    found = measured(model, torch.randn(1, entry.channels, PATCHES, 1))
    values = {
        "parameters": sum(p.numel() for p in model.head.parameters()),
        "operations": operations,
        "seconds_of_operations": round(operations / speed, 1),
        **found,
    }
    print(name, values, flush=True)
    keep_case("slide_encoders", f"step of {name}", values)


def steps(options: argparse.Namespace) -> None:
    for name in options.only:
        subprocess.run([sys.executable, "-m", "benchmarks.slide_encoders", "one", "--only", name], check=True)


def together(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    encoder = PatchEncoder(ResNet((16, 32, 64), norm="group"), 32)
    model = SlideClassifier(backbone=encoder, head=partial(Titan, width=384, depth=3, heads=6))
    values = measured(model, torch.randint(0, 256, (PATCHES, 3, 32, 32), dtype=torch.uint8))
    print(values, flush=True)
    keep_case("slide_encoders", "a small encoder of patches and TITAN of half its width and depth", values)


def planned(options: argparse.Namespace) -> None:
    for name in options.only:
        rows: list[dict[str, Any]] = []
        entry = named(name)
        size = encoder_named(entry.encoder).size
        for budget in ("24GiB", "80GiB"):
            with torch.device("meta"):
                model = SlideClassifier(backbone=PatchEncoder(entry.encoder), head=entry.head)
            begin = time.process_time()
            try:
                plan = make_plan(
                    step_of(model), (PATCHES, 3, size, size), budget=budget, device="cuda:a100", dtype=torch.uint8,
                    optimizer="adamw",
                )  # fmt: skip
            except BudgetError as error:
                rows.append({"budget": budget, "error": str(error).splitlines()[0]})
                continue
            row = {
                "budget": budget, "peak_bytes": plan.peak_bytes, "seconds": plan.seconds,
                "plain_bytes": plan.plain_bytes, "planning_seconds": round(time.process_time() - begin, 1),
            }  # fmt: skip
            rows.append(row)
            print(name, row, flush=True)
        values = {"encoder": entry.encoder, "size": size, "rows": rows}
        keep_case("slide_encoders", f"{entry.encoder} and {name}, planned", values)


def heads(options: argparse.Namespace) -> None:
    for name in options.only:
        entry = named(name)
        with torch.device("meta"):
            model = SlideClassifier(backbone=FrozenFeatures(entry.channels), head=entry.head)
        begin = time.process_time()
        plan = make_plan(
            step_of(model), (1, entry.channels, PATCHES, 1), budget=BUDGET, device="cuda:a100", optimizer="adamw"
        )
        row = {
            "peak_bytes": plan.peak_bytes, "seconds": plan.seconds, "plain_bytes": plan.plain_bytes,
            "operations": multiplications(entry), "planning_seconds": round(time.process_time() - begin, 1),
        }  # fmt: skip
        print(name, row, flush=True)
        keep_case("slide_encoders", f"{name} on features, planned", row)


def one(options: argparse.Namespace) -> None:
    one_step(*options.only)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["steps", "heads", "together", "planned", "one"])
    parser.add_argument("--only", nargs="+", default=SIX, help="names of slide encoders")
    options = parser.parse_args()
    cases = {"steps": steps, "heads": heads, "together": together, "planned": planned, "one": one}
    cases[options.case](options)


if __name__ == "__main__":
    main()
