"""A process that has imported everything and forks one for each run: a run costs no imports.

In: a line of JSON, `{"start": {...}}` or `{"wait": PID, "limit": SECONDS}`. Out: a line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import os
import select
import signal
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

IMPORTED = (
    "lightning_plugin.strategy", "wsi_trainer.fit.command", "wsi_trainer.fit.one_run", "wsi_trainer.cli.arguments",
    "wsi_trainer.slides.preprocess", "wsi_trainer.slides.review.command", "wsi_trainer.slides.verify",
    "wsi_trainer.fit.plan_command", "wsi_trainer.fit.status_command", "wsi_trainer.embed.command",
    "wsi_trainer.fit.export_command", "wsi_trainer.segment.command", "wsi_trainer.explain.command",
    "wsi_trainer.report.command", "wsi_trainer.view.command", "wsi_trainer.view.static_copy", "h5py", "zarr",
    "tifffile", "matplotlib.pyplot", "sklearn.metrics", "scipy.ndimage", "torch.utils.tensorboard", "safetensors.torch",
    "wsi_trainer.doctor.command", "wsi_trainer.demo.command", "imagecodecs", "openslide", "shapely",
)  # fmt: skip
LEFT = 15.0
"""Seconds that processes may outlive the one that began them."""


def warm() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    from docstring_parser.attrdoc import AttributeDocstrings

    read = AttributeDocstrings.get_attr_docs
    known = cache(lambda component: read(AttributeDocstrings(), component))
    AttributeDocstrings.get_attr_docs = lambda self, component: known(component)  # type: ignore[method-assign]


def start(job: dict[str, Any]) -> int:
    """A process in a group of its own that calls a function; it writes to the log."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    with Path(job["log"]).open("ab") as file:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(job.get("environment", {}))
    tempfile.tempdir = None  # it is asked for anew
    os.chdir(job["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        module, _, name = job["target"].partition(":")
        function = getattr(importlib.import_module(module), name)
        if job.get("setting"):  # armed by the process itself: what came before is nobody's
            main_is(job["setting"])
        code = int(function(*job["arguments"]) or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = 120
        os._exit(code)


def main_is(file: str) -> None:
    """Signals of the seam are for this process."""
    import mmap

    from tests.faults.seam import Setting

    with open(file, "r+b") as opened:
        setting = Setting.from_buffer(mmap.mmap(opened.fileno(), 0))
    setting.main = os.getpid()
    setting.armed = 1


def wait(pid: int, limit: float) -> dict[str, Any]:
    """The exit code, or minus the signal; None where it hangs; and whether it has left processes behind."""
    handle = os.pidfd_open(pid)
    ready, _, _ = select.select([handle], [], [], limit)
    os.close(handle)
    if not ready:
        _end(pid)
        os.waitpid(pid, 0)
        return {"code": None, "left": False}
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    until = time.monotonic() + LEFT
    while members(pid) and time.monotonic() < until:
        time.sleep(0.02)
    left = members(pid)
    _end(pid)
    members(pid)
    return {"code": code, "left": left}


def members(group: int) -> bool:
    """Whether processes of a group are alive; those that have ended are reaped."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        pass  # none of them is a child of this process, or none is left
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _end(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what a run leaves behind is reaped here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm()
    gc.collect()
    gc.freeze()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: Any = start(asked["start"]) if "start" in asked else wait(asked["wait"], asked["limit"])
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
