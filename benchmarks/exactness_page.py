"""Writes docs/exactness.md from the measured files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

INTRODUCTION = """# How exact it is

<!-- Written by `python -m benchmarks.exactness page`; edit benchmarks/exactness_page.py instead. -->

The engine computes what plain PyTorch computes: same output, loss, gradients and running statistics, up to the order in
which numbers are added. Everything on this page is measured in float64 against plain PyTorch. The error of a tensor is
max|a − b| / max(max|b|, 0.001 × the largest gradient in the network); the bound is 1e-9.

To measure your own model, use `lightning_plugin.check(module, small_input)`: it names the error of each parameter, in
float64 and in float32, on the image and on one that repeats itself, the operators that are run whole, and what it
cannot see. Which operators have a rule, and which tests reach each, is in
[Operators](operators.md).

`SyncBatchNorm` counts over ranks, so it belongs to the strategy that knows of ranks: under `sft_ddp` every
BatchNorm can be synchronised, on CPUs too, and its statistics are exact over tiles and ranks together.

Plain PyTorch itself was found wrong twice, on a CPU and for one image (PyTorch 2.13). The backward of a `BatchNorm` is
wrong where the image lies in channels-last order and its batch dimension, whose stride means nothing, has an unusual
one; the engine sees to it that its tiles have the usual ones. The backward of an `InstanceNorm` takes a cotangent in
channels-last order for one in contiguous order; finite differences show it. The engine's result is the derivative
there, and the comparison below gives PyTorch a contiguous cotangent.
"""

DEFERRED = """## What is deferred, and what could change in between

A recording runs when a value is needed, and backward later still; both read things again. For each of these it is said
here what may change in between, how the engine knows, and which tests would fail if it did not. Tests are under
`tests/lightning_plugin/`; besides, random steps draw these changes together (`test_random_steps.py`).

| deferred or repeated | what may change | what is remembered, or what happens | test |
| --- | --- | --- | --- |
| a captured tensor is used when the recording runs | its values | its version at the call; an error names it | `test_errors.py` |
| | whether it requires grad | a value for each use, with the flag it had | `test_deferred.py` |
| an image is read forward, and again in backward | its values | the source's version at the call; an error | `test_deferred.py` |
| parameters are used again in backward | an optimizer's step | their versions; an error | `test_errors.py`, `test_again.py` |
| results are constants of backward | the user writes to them | copies | `test_deferred.py` |
| a maximum is found again by its value | the last bits of a tile on another grid | the positions that tie, or they are counted again on backward's tiles | `test_ties.py` |
| a window's maximum is chosen again | the last bits of a tile | nothing: one position is chosen, whichever; no share is lost | `test_ties.py` |
| dropout is drawn again | the generator's state | the step's key and the position | `rules/test_random.py` |
| running statistics are moved when they are known | the result is dropped; the buffer is read, reset or copied; a read fails | the buffer awaits its update: its first use runs the recording; what has not happened is tried again | `test_deferred.py` |
| a write in place makes a new value | other tensors share the memory | views are followed both ways; where that is not possible, an error | `test_views.py`, `test_errors.py` |
| a segment's backward runs once | its results have nothing to do with each other | each connected part has a backward of its own | `test_separate_losses.py` |
| cotangents are collected over several segments | a pass ends early, or is asked for some gradients | the number of the pass | `test_separate_losses.py` |
| a plan is used for a later step | what lies on the device, gradients that are there, what a step holds already | the plan's key; what is beside is taken off the budget | `test_deferred.py`, `planner/test_step_budget.py` |
| backward needs the room that was planned | other calls still hold theirs | it is looked at before; smaller tiles, or an error | `test_deferred.py` |
| a rehearsal's backward | the thread it runs in | that it is one | `test_deferred.py` |
| a dropped map is made again | what it was made from | the versions above | `test_again.py` |

Not seen: a source without `version` whose pixels change, `.data` of a parameter written to (PyTorch does not see that
either), and what a module's own Python code reads at recording time.
"""


def write_page() -> Path:
    """Write the page from whatever has been measured."""
    parts = [INTRODUCTION, DEFERRED, random_part(), zoo_part(), timm_part(), precision_part()]
    path = ROOT / "docs" / "exactness.md"
    path.write_text("\n".join(p for p in parts if p))
    return path


def measured(name: str) -> Any:
    path = RESULTS / f"exactness_{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def listing(names: list[str]) -> str:
    return ", ".join(f"`{n}`" for n in names) or "–"


def random_part() -> str:
    data = measured("random")
    if data is None:
        return ""
    v = dict(data["values"])
    operators = v.pop("operators")
    counts = [[k, f"{v[k]:.1e}" if isinstance(v[k], float) else str(v[k])] for k in sorted(v)]
    used = ", ".join(f"{name} {count}" for name, count in operators.items())
    return (
        "## Random networks\n\nDirected acyclic graphs of operators, at random sizes, with random tile grids, "
        "different ones forward and backward, and random sets of stored and kept maps. *Badly conditioned* are "
        "networks in which one rounding of the input changes plain PyTorch's own result by so much that the bound "
        "means nothing; they are held to a hundred times that change.\n\n"
        + table(["", "count"], counts)
        + f"\nHow often each operator was drawn: {used}.\n"
    )


def zoo_part() -> str:
    data = measured("zoo")
    if data is None:
        return ""
    kinds = ["output", "loss", "parameter", "input", "buffer"]
    rows = [
        [
            f"`{r['name']}`",
            *(f"{r['errors'][k]:.0e}" if k in r["errors"] else "–" for k in kinds),
            listing(r["barriers"]),
        ]
        for r in data["rows"]
    ]
    return (
        "## Written-out networks\n\nThe largest error over train and eval mode, two sizes and two pairs of grids. The "
        "last column names operators that no rule could tile and that were run whole, which is exact too.\n\n"
        + table(["network", "output", "loss", "parameters", "image", "buffers", "run whole"], rows)
    )


def timm_part() -> str:
    data = measured("timm")
    if data is None:
        return ""
    rows = [timm_row(r) for r in data["rows"]]
    return (
        "## timm, unchanged\n\n*pass*: tiled from end to end; *barrier*: exact, with the named operators run whole; "
        "*error*: refused, with the message.\n\n"
        + table(["architecture", "image", "result", "largest error", "run whole"], rows)
    )


def timm_row(row: dict[str, Any]) -> list[str]:
    size = "×".join(map(str, row["shape"][2:]))
    error = f"{row['error']:.0e}" if "error" in row else "–"
    return [f"`{row['name']}`", size, row["result"], error, row.get("message") or listing(row["barriers"])]


def precision_part() -> str:
    rows = []
    for name, label in (("float32", "float32"), ("bfloat16_autocast", "bfloat16 autocast")):
        if data := measured(name):
            v = data["values"]
            rows.append([label, str(v["cases"]), f"{v['median ratio']:.2f}", f"{max(v['ratios'].values()):.2f}"])
    if not rows:
        return ""
    return (
        "## Lower precision\n\nThe tiled result's L2 distance from float64, output and all gradients together, divided "
        "by plain PyTorch's own.\n\n" + table(["", "networks", "median", "largest"], rows)
    )
