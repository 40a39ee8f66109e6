"""Where what a benchmark measured is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import RESULTS, environment

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"


def keep(name: str, values: dict[str, Any]) -> Path:
    """Write `benchmarks/results/NAME.json`, with the versions it was measured with."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"name": name, "environment": environment(), "values": values}
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    return path
