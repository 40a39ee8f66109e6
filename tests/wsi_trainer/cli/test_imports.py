"""Modules that are imported before a command does anything: torch and Lightning take seconds, a table takes none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from wsi_trainer.cli.commands import COMMANDS

HEAVY = ("torch", "pytorch_lightning", "lightning_plugin", "torchmetrics", "sklearn", "scipy.stats", "pandas")
COMPUTE = {"plan", "fit", "embed", "export", "validate", "test", "predict", "segment", "heatmap", "demo"}
"""Commands that train or predict."""


def imported(code: str, *words: str) -> set[str]:
    """The heavy modules that a process has imported after this code."""
    code += f"\nimport sys; print('imported', *(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    line = [line for line in done.stdout.splitlines() if line.startswith("imported")]
    assert line, done.stderr
    return set(line[-1].split()[1:])


@pytest.mark.parametrize("command", [row for row in COMMANDS if row.name not in COMPUTE], ids=lambda row: row.name)
def test_a_command_that_computes_nothing_imports_no_torch(command: object) -> None:
    module = command.target.partition(":")[0]  # type: ignore[attr-defined]
    assert imported(f"import {module}") == set()
