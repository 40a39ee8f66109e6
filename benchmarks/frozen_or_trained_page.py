"""The page docs/frozen-or-trained.md, from what `frozen_or_trained` measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import RESULTS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "frozen-or-trained.md"
_PAGE = """# A label that frozen features do not hold

A small encoder (VGG, 32 features) is trained to tell four coarse textures apart, whatever fine grain lies over them,
and does so for {known} of new patches. All runs here start with it. A slide is a bag of 36 patches. A
fifth of those of a positive slide have another *grain* (the label that the encoder was taught to look past) or, as a
control, one of the four *textures* (which it knows). {train} slides to train on, {val} to choose the checkpoint, {test}
held out, {epochs} epochs. End to end: `wsi-train fit --compare frozen` with attention pooling. Frozen: the same config
on features of the encoder as it was, and the other heads on the same features.

| label | seed | end to end | frozen, same head | difference (95 % interval) | frozen, best of the heads | \
difference to it |
|---|---|---|---|---|---|---|
{rows}

AUC on the held-out slides; intervals by bootstrap over slides, paired. Processor time of training: {seconds}.

- It shows that end-to-end training finds what an encoder does not represent, from labels of slides alone, and what it
  loses where features suffice: {lost:.3f} of AUC at most, of the same head.
- It does not show how often this happens with real slides and published encoders: the pictures were made so that it
  does. The best of the heads is chosen on the held-out slides, in favour of the frozen side; TransMIL was left out,
  since it takes longer than all others together.
- The set-up was chosen by trial on seed 0, not foreseen. With an encoder trained for 300 steps instead of 1,000, and
  the grain in a quarter of the patches, frozen features reached 0.81; with another encoder, a ResNet with group norms,
  and 80 slides, end-to-end training found little (0.51 to 0.76).

This page is written by `python -m benchmarks.frozen_or_trained` from
`benchmarks/results/frozen_or_trained.json`.
"""


def write_page() -> None:
    """Write the page of all cases that were measured."""
    cases = json.loads((RESULTS / "frozen_or_trained.json").read_text())["cases"]
    PAGE.write_text(page(list(cases.values())), encoding="utf-8")


def page(cases: list[dict[str, Any]]) -> str:
    """The page for these cases."""
    known = min(case["encoder_accuracy"] for case in cases)
    spent = [case["processor_seconds"] for case in cases]
    ranges = [f"{min(part):.0f} to {max(part):.0f} s" for part in zip(*spent)]
    return _PAGE.format(
        known=f"{100 * known:.0f} % and more",
        rows="\n".join(map(_row, sorted(cases, key=lambda case: (case["label"], case["seed"])))),
        seconds=f"{ranges[0]} end to end, {ranges[1]} on features",
        epochs=cases[0]["epochs"],
        lost=max(0.0, *(-next(iter(case["frozen"].values()))["difference"]["value"] for case in cases)),
        **cases[0]["slides"],
    )


def _row(case: dict[str, Any]) -> str:
    same = next(iter(case["frozen"].values()))
    name, best = max(case["frozen"].items(), key=lambda item: item[1]["auc"])
    cells = (
        case["label"],
        case["seed"],
        f"{case['trained_auc']:.3f}",
        f"{same['auc']:.3f}",
        _interval(same["difference"]),
        f"{best['auc']:.3f} ({name}, of {len(case['frozen'])})",
        _interval(best["difference"]),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _interval(found: dict[str, float]) -> str:
    return f"{found['value']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"
