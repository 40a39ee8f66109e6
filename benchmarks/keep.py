"""Files of results, one for each benchmark."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from tests.conftest import RESULTS, environment

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"


def keep(name: str, values: dict[str, Any]) -> Path:
    """Write `benchmarks/results/NAME.json`, with the versions it was measured with."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"name": name, "environment": environment(), "values": values}
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    return path


def keep_case(name: str, case: str, values: dict[str, Any]) -> None:
    """Put one case into `benchmarks/results/NAME.json`, with the machine it ran on; other cases stay."""
    path = RESULTS / f"{name}.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"name": name, "cases": {}}
    known["cases"][case] = {"machine": machine(), **values}
    RESULTS.mkdir(parents=True, exist_ok=True)
    write(path, known)


def write(path: Path, cases: dict[str, Any]) -> None:
    """Replace a file as a whole: who is stopped meanwhile leaves the former one."""
    beside = path.with_suffix(".json.new")
    beside.write_text(json.dumps(cases, indent=1, sort_keys=True) + "\n")
    beside.replace(path)


def amend_case(name: str, case: str, values: dict[str, Any]) -> None:
    """Add what was measured apart to a case that is there, which keeps the machine it ran on."""
    path = RESULTS / f"{name}.json"
    known = json.loads(path.read_text())
    known["cases"][case] |= values
    write(path, known)


def machine() -> dict[str, Any]:
    """The machine, as far as a timing depends on it."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        **environment(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
    }
