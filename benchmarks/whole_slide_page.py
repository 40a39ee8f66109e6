"""The part of docs/speed.md about a training step on a whole slide."""

from __future__ import annotations

from typing import Any

from benchmarks.exactness_page import table
from lightning_plugin.units import format_bytes


def whole_slide(data: Any) -> str:
    """What a step took on slides of several sizes, and how that goes with the size."""
    cases = sorted(data["cases"].values(), key=lambda c: (c["mode"], c["side"]))
    ran, refused = [c for c in cases if "refused" not in c], [c for c in cases if "refused" in c]
    rows = [
        [
            c["mode"],
            f"{c['side']:,}²",
            f"{c['tissue_pixels'] / 1e6:,.1f} M",
            f"{c['known_glass']:.0%}",
            f"{c['seconds']:,.0f} s",
            f"{c['processor_seconds']:,.0f} s",
            f"{c['predicted_seconds']:,.0f} s",
            c.get("rates", "built in"),
            f"{c['input_seconds']:.1f} s",
            f"{c['spill_seconds']:.0f} s",
            f"**{c['seconds_per_million']:.1f} s**",
            f"{seen_cost(c):.2f} s" if "seeing" in c else "–",
            format_bytes(c["ledger_bytes"]),
            format_bytes(c["process_bytes"]),
            format_bytes(c["disk_bytes"]),
            f"{c['plan_seconds']:.0f} s",
            f"{c['load']:.1f}",
        ]
        for c in ran
    ]
    head = ["BatchNorm", "slide", "tissue", "known glass", "a step", "processor", "predicted", "rates", "input"]
    head += ["lower tiers", "a million of tissue", "of pixels that see tissue", "ledger", "process", "disk"]
    head += ["planning", "load"]
    budget = " and ".join(sorted({c["budget"] for c in cases}))
    return (
        f"## A whole slide\n\nOne training step of a ResNet-18 of half width under {budget}, from the store that "
        "`wsi-train preprocess` makes of a synthetic slide, batch 1, float32, one thread. Plans go by *rates* that "
        "were calibrated before, or by the built-in ones of an older processor. *Input* and *lower tiers* are what the "
        "step waited for, on the clock; *known glass* is the part of the slide that its store knows in whole blocks. "
        "*Process* is its growth at the peak, the reader's cache among it; *disk* the most room that maps were seen to "
        "take. All parameters are trained, also where BatchNorm is frozen. *Load* is how many processes ran or waited "
        "on the two processors: beside others, the clock says little."
        + "".join(f" {spread_of(mode, ran)}" for mode in sorted({c["mode"] for c in ran}))
        + " Two things go with the size. What the network sees makes a border around tissue that is as wide on every "
        "slide: *pixels that see tissue* are those no further from what is not known to be glass than half of what a "
        "position of the last map sees, where that map differs from glass."
        + "".join(f" {spread_seen(mode, ran)}" for mode in sorted({c["mode"] for c in ran if "seeing" in c}))
        + " And the budget holds more of a small slide's maps, so that less "
        "of them is made again.\n\n" + table(head, rows) + "".join(map(not_begun, refused))
    )


def seen_cost(c: Any) -> float:
    """Processor seconds for a million pixels from which the network sees tissue."""
    return float(1e6 * c["processor_seconds"] / (c["seeing"] * c["side"] ** 2))


def spread_seen(mode: str, cases: list[Any]) -> str:
    """How far that differs between sizes."""
    costs = [seen_cost(c) for c in cases if c["mode"] == mode and "seeing" in c]
    return f"In the mode *{mode}* a million of these costs {min(costs):.2f} to {max(costs):.2f} s."


def spread_of(mode: str, cases: list[Any]) -> str:
    """How far the time for a pixel of tissue differs between sizes."""
    mine = [c for c in cases if c["mode"] == mode]
    costs = {c["side"]: c["seconds_per_million"] for c in mine}
    least, most = min(costs, key=costs.__getitem__), max(costs, key=costs.__getitem__)
    return (
        f"In the mode *{mode}* a pixel of tissue costs {costs[most] / costs[least]:.2f} times as much at {most:,}² as "
        f"at {least:,}², which is {'' if costs[most] <= 1.1 * costs[least] else 'not '}within a tenth."
    )


def not_begun(c: Any) -> str:
    """A step that was refused."""
    return (
        f"\nThe step at {c['side']:,}² in the mode *{c['mode']}* was refused before its first tile, for want of room "
        f"on the disk: its plan stores {format_bytes(c['planned_disk_bytes'])} of maps, glass among them, and predicts "
        f"{c['predicted_seconds']:,.0f} s.\n"
    )
