"""Runs `wsi-train fit` in processes that are killed at random moments, continues each, and compares the weights.

In a process of its own, which has imported everything and forks: importing takes longer than a small run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from itertools import pairwise
from pathlib import Path

import torch

from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run


def start(words: list[str], log: Path) -> int:
    """A process that runs the command; its output goes to the log."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        code = 1
        try:
            code = main(words)
        finally:
            os._exit(code)


def ended(pid: int) -> int:
    """Wait for a process; its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def final(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(Run(folder).checkpoint("last"), weights_only=False)["state_dict"]


def steps(folder: Path) -> int:
    """How many steps of the optimizer the last checkpoint has; -1 where there is none."""
    path = Run(folder).checkpoint_path("last")
    return int(torch.load(path, weights_only=False)["global_step"]) if path.is_file() else -1


def written(path: Path) -> int:
    """What changes whenever a file is written anew; 0 where it is not there."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def watch(pid: int, path: Path, until: int | None = None) -> list[float]:
    """The seconds at which a running process wrote a file, until it has done so often enough or has ended."""
    seen, moments = 0, [time.perf_counter()]
    while until is None or len(moments) <= until:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        if (now := written(path)) != seen:
            seen = now
            moments.append(time.perf_counter())
        time.sleep(0.001)
    return moments


def trial(words: list[str], folder: Path, moment: float, pause: float) -> int:
    """Kill one run and continue it; the step of the checkpoint that it continued from.

    Args:
        words: The command.
        folder: That of the run.
        moment: How often its checkpoint is written before, and a share of the pause to the next time.
        pause: Seconds between two of them; where the moment is below 1, those before the first.
    """
    while True:
        pid = start([*words, f"--out={folder}", "--resume=last"], folder.with_suffix(".log"))
        watch(pid, Run(folder).checkpoint_path("last"), until=int(moment))
        time.sleep((moment % 1) * pause)
        os.kill(pid, signal.SIGKILL)
        if ended(pid) == -signal.SIGKILL:
            break
        shutil.rmtree(folder)  # it ended before it was killed
    continued = steps(folder)
    if ended(start([*words, f"--out={folder}", "--resume=last"], folder.with_suffix(".log"))):
        raise RuntimeError(f"continuing {folder} failed: {folder.with_suffix('.log').read_text()[-2000:]}")
    return continued


def uninterrupted(words: list[str], folder: Path) -> list[float]:
    """Run to the end; the seconds from its start to the first checkpoint, and from each to the next."""
    pid = start([*words, f"--out={folder}"], folder.with_suffix(".log"))
    moments = watch(pid, Run(folder).checkpoint_path("last"))
    if ended(pid):
        raise RuntimeError(folder.with_suffix(".log").read_text()[-2000:])
    return [after - before for before, after in pairwise(moments)]


def measure(folder: Path, count: int, seed: int, words: list[str]) -> dict[str, object]:
    torch.set_num_threads(1)
    generator = random.Random(seed)
    pauses = uninterrupted(words, folder / "whole")
    expected = final(folder / "whole")
    continued, identical = [], 0
    for index in range(count):
        run = folder / f"killed-{index}"
        # Anywhere between two checkpoints, each pair as likely as any other: before the first is one of the places.
        moment = generator.uniform(0, len(pauses))
        continued.append(trial(words, run, moment, pauses[int(moment)]))
        actual = final(run)
        same = actual.keys() == expected.keys() and all(torch.equal(v, actual[k]) for k, v in expected.items())
        identical += same
    total = steps(folder / "whole")
    return {"kills": count, "identical": identical, "steps": total, "continued_from_step": continued}


def report(folder: Path, count: int, seed: int, words: list[str], out: Path) -> None:
    """Measure, and leave what was found in a file."""
    out.write_text(json.dumps(measure(folder, count, seed, words)))
