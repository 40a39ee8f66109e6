"""The part of docs/speed.md about parameters that live below the device."""

from __future__ import annotations

from typing import Any

from benchmarks.exactness_page import table

MIB = 2**20


def streamed(data: Any) -> str:
    """Training beside plain PyTorch, a vision transformer, and plans of what fits no card."""
    cases = data["cases"]
    parts = [
        "## Parameters that do not fit\n\nParameters, gradients and AdamW's state that are larger than the budget live "
        "on the host or the disk ([how](how-to/large-models.md)). Sizes are of the whole network, float64; losses are "
        "compared with plain PyTorch's, step by step, in the same run."
    ]
    trained = [(name.split(", ")[1], case) for name, case in cases.items() if name.startswith("train, ")]
    head = ["tier", "parameters", "budget", "peak", "travels in a step", "recomputed", "plain", "speed of plain's"]
    rows = [
        [
            tier,
            f"{c['parameters MiB']:,.0f} MiB",
            f"{c['budget MiB']:,.0f} MiB",
            f"{c['peak MiB']:,.0f} MiB",
            f"{c['traffic MiB a step']:,.0f} MiB",
            f"{100 * c['recompute']:.0f} %",
            f"{c['plain seconds']:.1f} s",
            f"**{c['speed of plain']:.2f}**",
        ]
        for tier, c in trained
    ]
    parts.append(
        table([*head, "losses differ by"], [[*r, difference(c)] for r, (_, c) in zip(rows, trained, strict=True)])
    )
    parts += [
        f"The disk's folder read {c['disk MiB a second']:,.0f} MiB a second past the system's cache."
        for _, c in trained
        if "disk MiB a second" in c
    ]
    if (c := cases.get("vit")) is not None:
        parts.append(
            f"ViT-L/16 ({c['parameters MiB']:,.0f} MiB of parameters) on a bag of {c['patches']} patches with AdamW "
            f"under {c['budget MiB']:,.0f} MiB: peak {c['peak MiB']:,.0f} MiB, gradients within "
            f"{c['error of gradients, float32']:.1e} of plain PyTorch's in float32, {c['step seconds']:.0f} s a step "
            f"where plain PyTorch takes {c['plain seconds']:.0f} s (one step each)."
        )
    planned = [(name, c) for name, c in cases.items() if "planning seconds" in c]
    if planned:
        head = ["planned on 11 GiB", "parameters", "streamed", "travels in a step", "predicted", "planning"]
        rows = [
            [
                name,
                f"{c['parameters'] / 1e9:.1f} billion",
                f"{c['streamed GiB']:,.0f} GiB",
                f"{c['traffic GiB a step']:,.0f} GiB",
                f"{c['predicted seconds a step']:,.0f} s",
                f"{c['planning seconds']:.0f} s",
            ]
            for name, c in planned
        ]
        parts.append(table(head, rows))
    return "\n\n".join(parts) + "\n"


NAMES = {
    "plain": "plain PyTorch",
    "zero3": "DeepSpeed ZeRO-3, everything offloaded to the CPU",
    "zero3-small": "the same, with small buffers",
    "zero3-nvme": "the same, parameters and optimizer in files",
    "sft-host": "`SFTStrategy`, host",
    "sft-disk": "`SFTStrategy`, disk",
}


def offloading(data: Any) -> str:
    """Another library that offloads, beside the engine."""
    cases = data["cases"]
    head = ["", "a step", "process", "of it anonymous", "losses differ by"]
    rows = [
        [
            words,
            f"{c['seconds a step']:.1f} s",
            f"{c['process peak'] / MIB:,.0f} MiB",
            f"{c['anonymous peak'] / MIB:,.0f} MiB",
            f"{c['losses differ by']:.1e}",
        ]
        for name, words in NAMES.items()
        if (c := cases.get(name)) is not None
    ]
    any_case = next(iter(cases.values()))
    size = f"{any_case['parameters'] / MIB:,.0f} MiB"
    return (
        f"### Beside DeepSpeed\n\nA language model with {size} of parameters in float32, four times that with "
        "gradients and AdamW's state; the engine has an eighth of this as its budget. One thread, four steps, one "
        "process each, one after the other. DeepSpeed 0.19.8 runs on a CPU with gradient clipping said to be off (it "
        "clips where nothing is said), and in files with its prefetch off. Here the CPU's memory is the device's: what "
        "is offloaded to it is no less memory of the process, DeepSpeed's or ours. Its files are opened past the "
        "system's cache and ours are not, so these two are not compared by time. Memory repeats within a few percent, "
        "times within a quarter. `python -m benchmarks.offloading`.\n\n" + table(head, rows)
    )


def difference(case: dict[str, Any]) -> str:
    return f"{case['largest difference of losses']:.1e} in {case['steps']} steps"
