"""Modules that only some systems have are not needed to import the packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.warm import forget, start

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
assert not failed, failed
"""

#: A step with everything that touches files and the process: maps and parameters on the disk, the process's size.
STEP = """
import mmap
from torch import nn
from pathlib import Path

for name in ("pwritev", "posix_fallocate"):
    delattr(os, name)
del mmap.MADV_DONTNEED
status = os.fstat


class Status:  # Windows tells no blocks
    def __init__(self, number):
        self.st_size = status(number).st_size


import lightning_plugin.memory
from lightning_plugin import TiledModule
from lightning_plugin.planner.calibrate import to_disk

os.fstat = Status
lightning_plugin.memory.STATM = Path("/nowhere")
torch.manual_seed(0)
maps = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
    nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2),
)
weights = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 20_000), nn.Linear(20_000, 9)
)
below = set()
for net, budget in ((maps, "16MiB"), (weights, "5MiB")):
    net, image = net.double(), torch.rand(1, 3, 384, 512, dtype=torch.float64)
    net(image).square().sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad(set_to_none=True)
    tiled = TiledModule(net, budget=budget, parameters="disk")
    tiled(image).square().sum().backward()
    assert all((p.grad - e).norm() <= 1e-9 * (1 + e.norm()) for p, e in zip(net.parameters(), expected)), budget
    below |= {"maps"} if any(s.tier == "disk" for s in tiled.plan.segments) else set()
    below |= {"parameters"} if tiled.plan.on_disk else set()
assert below == {"maps", "parameters"}, below
assert to_disk() > 0
print("exact", end="")
"""


@pytest.mark.slow
def test_all_modules_import_and_a_step_is_exact_on_a_system_with_less(tmp_path: Path) -> None:
    process = start(tmp_path / "log", run)
    process.join(300)
    said = (tmp_path / "log").read_text()
    assert process.exitcode == 0 and said.splitlines()[-1] == "exact", said[-2000:]


def run() -> None:
    forget("lightning_plugin", "wsi_trainer")
    exec(PROGRAM + STEP, {})
