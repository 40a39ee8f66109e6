"""Modules that only some systems have are not needed to import the packages."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, os, pkgutil, signal, sys
import filelock, pytorch_lightning, torch, torch.distributed, rich.console, tensorboard, matplotlib.pyplot  # noqa
import multiprocessing.popen_spawn_posix, subprocess, zarr, numcodecs, tifffile, openslide, imagecodecs  # noqa
import jsonargparse, psutil, scipy.stats, sklearn.model_selection, jinja2, contourpy, PIL.Image, torchmetrics  # noqa

for name in ("fcntl", "resource", "termios", "grp", "pwd"):
    sys.modules[name] = None
for name in ("sysconf", "pread", "preadv", "pwrite", "posix_fadvise", "sched_getaffinity", "O_DIRECT", "fork"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP"):
    delattr(signal, name)
failed = []
for package in ("lightning_plugin", "wsi_trainer"):
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not found.name.endswith("__main__"):
            try:
                importlib.import_module(found.name)
            except Exception as error:
                failed.append(f"{found.name}: {error!r}")
print("\\n".join(failed) or "all", end="")
"""


def test_all_modules_import_on_a_system_with_less() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "all", done.stdout + done.stderr[-2000:]
