"""The command `status`: how far a run is that goes on elsewhere, has ended, or has died."""

import json as json_format
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from wsi_trainer.errors import UserError
from wsi_trainer.fit.bundle import write_bundle
from wsi_trainer.fit.estimate import duration
from wsi_trainer.fit.events import OUTCOMES
from wsi_trainer.fit.memory import format_bytes
from wsi_trainer.fit.status import RunStatus, status_of
from wsi_trainer.terminal import say

COLOURS = {"running": "green", "done": "green", "failed": "bold red", "died": "bold red", "stopped": "yellow"}
LEFT = {"died", *OUTCOMES}
"""States that nothing follows."""


def status(run: Path, json: bool = False, watch: bool = False, every: float = 10.0, bundle: Path | None = None) -> int:
    """Say how far a run is: progress, time left, memory, who runs it, whether its process lives, the last error.

    It only reads the log in the run's folder, so it may be asked from anywhere that sees the folder. The exit code is
    1 where the run, or a fold, has failed or died.

    Args:
        run: the folder of a run or of a cross-validation, `--out` of `wsi-train fit`
        json: print JSON, one line each time
        watch: say it again and again until the run has ended
        every: with `watch`, seconds between two looks
        bundle: instead write this zip, to ask for help with: versions, plan, config, the last records and what
            `wsi-train doctor` says, without slides, names of slides, patients and users, and paths
    """
    if bundle is not None:
        say(Console(), f"{bundle} holds {', '.join(write_bundle(run, bundle))}: look into it before you send it")
        return 0
    if not 0 < every < 86400:
        raise UserError(f"--every is {every}; expected seconds, above 0 and below a day")
    console = Console()
    while True:
        found = status_of(run)
        if json:
            print(json_format.dumps({"schema": 1, "runs": [asdict(one) for one in found]}), flush=True)
        else:
            for one in found:
                show(one, console)
        if not watch or all(one.state in LEFT for one in found):
            return int(any(one.state in ("failed", "died") for one in found))
        time.sleep(every)


def show(one: RunStatus, console: Console) -> None:
    """One run in a few lines."""
    say(console, headline(one), lead=one.state, lead_style=COLOURS.get(one.state, "bold"))
    for line in details(one):
        say(console, f"  {line}")


def headline(one: RunStatus) -> str:
    """Name, progress and time left."""
    parts = [one.run]
    if one.progress is not None:
        parts.append(f"{one.progress:.0%} of the training")
    if one.epoch is not None and one.epochs:
        parts.append(f"epoch {one.epoch + 1} of {one.epochs}")
    if one.step is not None:
        parts.append(f"step {one.step}")
    if one.seconds_left is not None:
        parts.append(f"about {duration(one.seconds_left)} left")
    return ", ".join(parts)


def details(one: RunStatus) -> list[str]:
    """Everything else that is known, a line each."""
    lines = []
    if one.host is not None:
        silent = f", last heard of {duration(one.silent_seconds)} ago" if one.silent_seconds is not None else ""
        lines.append(f"process {one.pid} of {one.user} on {one.host}, since {one.began}{silent}")
    if one.loss is not None:
        lines.append(f"loss {one.loss if isinstance(one.loss, str) else format(one.loss, '.4g')}")
    if one.memory is not None:
        device = (
            "" if one.device_memory is None else f"; steps have needed {format_bytes(one.device_memory)} of the device"
        )
        lines.append(f"memory {format_bytes(one.memory)}{device}")
    if one.scores:
        lines.append(", ".join(f"{k} {v if isinstance(v, str) else format(v, '.4g')}" for k, v in one.scores.items()))
    if one.not_finite:
        first = "" if one.first_lost is None else f"; {one.first_lost}"
        lines.append(f"{one.not_finite} losses were not finite: the log names slides and steps{first}")
    lines += [f"warning: {text}" for text in one.warnings]
    if one.last_error is not None:
        lines.append(f"error: {one.last_error}")
    if one.state in ("died", "stopped", "failed"):
        lines.append("continue it with `wsi-train fit ... --ckpt_path last`")
    return lines
