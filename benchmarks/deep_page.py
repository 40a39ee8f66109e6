"""The part of docs/speed.md about very deep networks."""

from __future__ import annotations

from typing import Any

from benchmarks.exactness_page import table
from lightning_plugin.units import format_bytes


def deep(data: Any) -> str:
    cases = sorted((c for c in data["cases"].values() if "layers" in c), key=lambda c: c["layers"])
    head = [
        "layers", "parameters and gradients", "slots", "held beside them", "a step", "planning", "plain PyTorch",
        "gradients differ by", "process",
    ]  # fmt: skip
    rows = [
        [
            f"{c['layers']:,}",
            format_bytes(c["parameters and gradients"]),
            str(c["chains"][0]["slots"]) if c["chains"] else "–",
            f"**{format_bytes(c['maps'])}**",
            f"{c['seconds']:,.1f} s",
            f"{c['planning seconds']:.1f} s ({100 * c['planning seconds'] / c['seconds']:.0f} %)",
            f"{c['plain seconds']:,.1f} s" if "plain seconds" in c else "not run",
            f"{c['gradients differ by']:.1e}" if "gradients differ by" in c else "–",
            format_bytes(c["process peak"]),
        ]
        for c in cases
    ]
    one = format_bytes(cases[0]["one map"])
    return (
        "## As deep as you like\n\nResidual networks of two convolutions a block, 4 channels of 32 × 32 in float64 (a "
        f"map takes {one}), on one thread: the first step of a process, with recording and planning. Blocks are links "
        "of a chain, and there is room for 8 + 2 log₂(layers) maps. Where plain PyTorch was run, after it in the same "
        "process, gradients are equal to the bit: its own kernels run, in its order. The C library was told to give "
        "blocks as large as a map back (`MALLOC_MMAP_THRESHOLD_`); else it keeps the holes between gradients, and the "
        "process grows to several times of this. `python -m benchmarks.deep step`.\n\n"
        + table(head, rows)
        + "\n\n![Memory beside parameters, and seconds of a step, against layers, on logarithmic scales.]"
        "(figures/deep.png)\n" + both(data["cases"].get("both"))
    )


def both(case: dict[str, Any] | None) -> str:
    """A deep network with streamed parameters."""
    if case is None:
        return ""
    (chain,) = case["chains"]
    size = {name: format_bytes(case[name]) for name in ("parameters", "plain holds for backward", "budget", "peak")}
    seconds, plain = case["seconds with planning"], case["plain seconds"]
    return (
        f"\nBoth at once: {chain['links']} blocks with {size['parameters']} of parameters in float32, as much again of "
        f"gradients, and {size['plain holds for backward']} of maps in plain PyTorch, under a budget of "
        f"{size['budget']}: parameters on the disk, {chain['slots']} slots. Held are {size['peak']} at most, a step "
        f"takes {seconds:.0f} s with its plan where plain PyTorch takes {plain:.0f} s, and gradients differ by "
        f"{case['gradients differ by']:.1e}.\n"
    )
