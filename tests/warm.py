"""Processes that have nothing to import: each is forked from one that imported everything, once in a run of tests.

To import torch, Lightning and the packages takes longer than what most tests do in a process of their own. Not for
tests of how much memory a whole process takes, or of what is imported, unless it is unloaded before: see `forget`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = ["lightning_plugin.strategy", "wsi_trainer.fit.command", "hypothesis"]


def start(
    log: Path, target: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> ForkServerProcess:
    """A process that calls a function of a module, with more in its environment; it writes to the log."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # what is forked has the modules of this tree, wherever a test has gone
        patch.chdir(ROOT)
        multiprocessing.forkserver.ensure_running()
    process = context.Process(target=_call, args=(log, target, arguments, dict(environment or {})))
    process.start()
    return process


def forget(*packages: str) -> None:
    """Unload packages in a process of one's own, which then imports them anew; what they import is still there."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__.partition(".")[0] not in packages]
    importlib.invalidate_caches()


def _call(log: Path, target: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    multiprocessing.set_start_method("fork", force=True)  # what a program of its own begins with on Linux
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # in the order in which it was written
    target(*arguments)
