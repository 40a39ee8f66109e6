"""Results of benchmarks: one file for each benchmark, one entry for each case, with the machine it ran on."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> dict[str, Any]:
    """What a timing depends on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def write(name: str, case: str, values: dict[str, Any]) -> None:
    """Put a case into its benchmark's file; cases that were measured earlier stay."""
    path = RESULTS / f"{name}.json"
    known = json.loads(path.read_text()) if path.exists() else {"name": name, "cases": {}}
    known["cases"][case] = {"machine": machine(), **values}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
