"""The page docs/encoders.md: what a step on 10,000 patches takes with each published encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import RESULTS
from wsi_trainer.fit.estimate import duration
from wsi_trainer.fit.memory import format_bytes
from wsi_trainer.models.encoders.registry import ENCODERS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "encoders.md"
_PAGE = """# What a step takes with each encoder

One training step on a bag of 10,000 patches, each encoder trained whole with AdamW, in float32 with attention pooling,
patches of the encoder's own size. Planned without data, with the rates of an H100 for all cards, so that times on a
slower card are longer: no weights were loaded and nothing of this was run. Bytes on the device include parameters,
gradients and AdamW's moments.

| encoder | patch | parameters | plain PyTorch holds for backward | {budgets} |
|---|---|---|---|{rule}
{rows}

Each cell: what is held on the device, and the predicted time of the step; where no plan fits, the memory that one
would need.{absent} [Bags of patches](how-to/patches.md) says how to plan for your own bags (`wsi-train plan --patches
K`).

{steps}
This page is written by `python -m benchmarks.encoders planned` from `benchmarks/results/encoders.json`.
"""
_STEPS = """Real steps of timm's ViT-S/16 on all tissue patches of a slide, all of it trained, on one core of a CPU in
float32, by the trainer of `wsi-train fit` within {budget}; `python -m benchmarks.encoders step`:

| slide | patches | held by the step | by the process | plain PyTorch would hold for backward | processor time |
|---|---|---|---|---|---|
{rows}
"""


def write_page() -> None:
    """Write the page of all cases that were measured."""
    cases = json.loads((RESULTS / "encoders.json").read_text())["cases"]
    plans = [case for name, case in cases.items() if name.startswith("planned")]
    steps = [case for name, case in cases.items() if name.startswith("step")]
    if not plans:
        return
    budgets = list(plans[0]["plans"])
    page = _PAGE.format(
        budgets=" | ".join(budget.replace("GiB", " GiB") for budget in budgets),
        rule="---|" * len(budgets),
        rows="\n".join(map(_row, sorted(plans, key=lambda case: case["parameters_bytes"]))),
        absent=_absent({case["encoder"] for case in plans}),
        steps=_steps(sorted(steps, key=lambda case: case["patches"])) if steps else "",
    )
    PAGE.write_text(page, encoding="utf-8")


def _absent(names: set[str]) -> str:
    """Which encoders of the registry were not planned."""
    others = [encoder.name for encoder in ENCODERS if encoder.name not in names]
    return f" Not planned yet: {', '.join(others)}." if others else ""


def _row(case: dict[str, Any]) -> str:
    moments = 2 * case["parameters_bytes"]
    plain = next((format_bytes(p["plain_bytes"]) for p in case["plans"].values() if "plain_bytes" in p), "")
    cells = [f"`{case['encoder']}`", f"{case['size']}", format_bytes(case["parameters_bytes"]), plain]
    for plan in case["plans"].values():
        if "smallest" in plan:
            cells.append(f"needs {format_bytes(plan['smallest'] + moments)}")
        else:
            cells.append(f"{format_bytes(plan['peak_bytes'] + moments)}, {duration(plan['seconds'])}")
    return f"| {' | '.join(cells)} |"


def _steps(cases: list[dict[str, Any]]) -> str:
    rows = []
    for case in cases:
        held = [format_bytes(case[key]) for key in ("step_peak_bytes", "process_peak_bytes", "plain_bytes")]
        cells = [case["slide"], str(case["patches"]), *held, duration(case["processor_seconds"])]
        rows.append(f"| {' | '.join(cells)} |")
    return _STEPS.format(rows="\n".join(rows), budget=format_bytes(cases[0]["budget"]))
