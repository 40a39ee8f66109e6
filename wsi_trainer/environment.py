"""Versions of packages, the machine and its device, as runs and results keep them."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

PACKAGES = (
    "wsi-trainer", "torch", "pytorch-lightning", "torchmetrics", "numpy", "scikit-learn",
    "openslide-python", "tifffile", "zarr",
)  # fmt: skip
"""Packages whose versions decide numbers."""


def versions() -> dict[str, str]:
    """The version of each package that decides numbers."""
    return {name: _version(name) for name in PACKAGES}


def environment() -> dict[str, Any]:
    """Versions, machine and device, as JSON."""
    import torch

    return {
        "python": sys.version.split()[0],
        "host": platform.node(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": _device(),
        "packages": versions(),
    }


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    return "cpu"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"
