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

Plain PyTorch itself was found wrong three times, on a CPU (PyTorch 2.13). For one image, the backward of a
`BatchNorm` is wrong where the image lies in channels-last order and its batch dimension, whose stride means nothing,
has an unusual one; the engine sees to it that its tiles have the usual ones. The backward of an `InstanceNorm` takes
a cotangent in channels-last order for one in contiguous order; finite differences show it. The engine's result is the
derivative there, and the comparison below gives PyTorch a contiguous cotangent. A `GroupNorm` with a bias and no
weight has no backward at all ("tensor does not have a device"); in tiles it has.

On CUDA the tests of the engine run with `pytest --device cuda tests/lightning_plugin`, in float32 without TF32, which
PyTorch uses for convolutions by default and which has ten bits. On an NVIDIA H100 with PyTorch 2.11 a half of them,
733 drawn by their names, found what was wrong there and is mended: a budget counted what lay on the device before; the
neighbours of `nearest` were a CPU's; the kernel of `batch_norm`'s backward is wrong where the input's gradient is not
asked for, which the engine no longer does. An axis that keeps its size under a factor (`interpolate` by `(0.4, 1.04)`
of 13 pixels) is left to PyTorch, whose forward and backward disagree about it. A Trainer learns the same there in
float64, float32 and bfloat16.
"""

#: The table of what is deferred, and what is remembered of it.
DEFERRED = (ROOT / "benchmarks" / "deferred.md").read_text()


def write_page() -> Path:
    """Write the page from whatever has been measured."""
    parts = [INTRODUCTION, DEFERRED, random_part(), deep_part(), axes_part(), steps_part(), zoo_part()]
    parts += [timm_part(), transformers_part(), precision_part()]
    path = ROOT / "docs" / "exactness.md"
    path.write_text("\n".join(p for p in parts if p))
    return path


def measured(name: str) -> Any:
    return result(f"exactness_{name}")


def result(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def listing(names: list[str]) -> str:
    return ", ".join(f"`{n}`" for n in names) or "–"


def counted(values: dict[str, Any]) -> str:
    """What was counted, by name; errors among it."""
    rows = [[k, f"{values[k]:.1e}" if isinstance(values[k], float) else str(values[k])] for k in sorted(values)]
    return table(["", "count"], rows)


def random_part() -> str:
    data = measured("random")
    if data is None:
        return ""
    v = dict(data["values"])
    operators = v.pop("operators")
    used = ", ".join(f"{name} {count}" for name, count in operators.items())
    return (
        "## Random networks\n\nDirected acyclic graphs of operators, at random sizes, with random tile grids, "
        "different ones forward and backward, and random sets of stored and kept maps. *Badly conditioned* are "
        "networks in which one rounding of the input changes plain PyTorch's own result by so much that the bound "
        "means nothing; they are held to a hundred times that change.\n\n"
        + counted(v)
        + f"\nHow often each operator was drawn: {used}.\n"
    )


def deep_part() -> str:
    data = measured("deep")
    if data is None:
        return ""
    return (
        "## Random deep networks\n\nA random network of the same kind, again and again: what it makes is added to what "
        "it was given; in some a number of each image goes on beside the map, in some the copies are one module, in "
        "some a mean of each copy is read later. Copies are links of a chain, with any number of slots, any share of "
        "them kept, inside in any segments.\n\n" + counted(data["values"])
    )


def axes_part() -> str:
    data = measured("axes")
    if data is None:
        return ""
    return (
        "## Random networks of patches and batches\n\nThree optimizer steps of networks that cut an image, or each "
        "image of a batch, into patches in one of the ways that people write it (`by_...`), or not (`whole`), encode "
        "them with convolutions, norms, windows and attention of random forms, attend over patches, and pool; at prime "
        "sizes and grids that divide nothing. Those with a barrier, as far as they were looked at, are of a single "
        "patch whose tokens an operator mixes: nothing is left to cut.\n\n" + counted(data["values"])
    )


def steps_part() -> str:
    exact, few, memory = measured("steps"), measured("steps_few_digits"), result("step_memory")
    if exact is None or few is None:
        return ""
    columns = [exact["values"], few["values"]]
    kinds = sorted({k for c in columns for k, n in c.items() if isinstance(n, int)} - {"steps"})
    rows = [[k, *(str(c.get(k, 0)) for c in columns)] for k in ("steps", *kinds)]
    units = [c["largest error over the bound's unit"] for c in columns]
    errors = [", ".join(f"{kind} {found:.2f}" for kind, found in u.items()) for u in units]
    text = (
        "## Random steps\n\nTraining steps of several calls, networks, images and losses: pulled back in any order, "
        "twice or never, on repeated and mirrored images, with parameters frozen, images and results changed, results "
        "dropped, sources that fail, hooks, tied weights, writes in place, nested checkpoints. In float64 the error is "
        "held to the bound of this page (1 is that bound). In float32, bfloat16 and under autocast the distance to "
        "float64, over all of a step's numbers, is held to twice plain PyTorch's own (1 is PyTorch's own). Where "
        "PyTorch refuses a step, because something was written over that it needs, the engine refuses it too or gives "
        "the number that a copy made in time would have given.\n\n"
        + table(["", "float64", "fewer digits"], [*rows, ["largest error", *errors]])
    )
    if memory is not None:
        v = memory["values"]
        text += (
            f"\nOf {v['steps']} such steps under random budgets, none held more than its budget by the books of "
            f"PyTorch's own allocator (and 1 KiB for the code around the modules): at most "
            f"{v['largest held / budget']:.3f} of it, in the median {v['median held / budget']:.2f}. "
            f"{v['refused before']} were refused smaller budgets before, {v['refused more than once']} of them more "
            f"than once (at most {v['most refusals']} times): with the budget that a refusal in the middle of a step "
            "names, the calls before it take more, too.\n"
        )
    return text


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


def transformers_part() -> str:
    data = measured("transformers")
    if data is None:
        return ""
    rows = [[*timm_row(r)[:4], f"{r['rounding']:.0e}" if "rounding" in r else "–"] for r in data["rows"]]
    return (
        "## transformers, unchanged\n\nModels of a second library, built from their configurations. `eager` is the "
        "library's own attention, which in many models rounds its softmax to float32; the last column is what comes of "
        "that without tiles, against the same weights with `sdpa`: the error is of that order, in the gradients of key "
        "biases above all, which are nothing but rounding.\n\n"
        + table(["model", "image", "result", "largest error", "its own rounding"], rows)
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
