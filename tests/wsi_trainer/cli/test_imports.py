"""Modules that are imported before a command does anything: torch and Lightning take seconds, a table takes none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from wsi_trainer.cli.commands import COMMANDS, GROUPS, keys_of_group
from wsi_trainer.cli.parsing import keys_of
from wsi_trainer.fit.parser import make_parser

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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.manifst=x.csv"], "unknown argument '--data.manifst'; did you mean '--data.manifest'? valid: --data."),
        (["--train.epoch", "3"], "unknown argument '--train.epoch'; did you mean '--train.epochs'?"),
        (["--model.bakbone=VGG"], "did you mean '--model.backbone'?"),
        (["--config=typo.yaml"], "unknown key 'data.splts' in typo.yaml; did you mean 'data.splits'?"),
    ],
)
def test_a_typo_is_said_before_torch_is_imported(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "typo.yaml").write_text("data:\n  splts: x.csv\n")
    code = f"import os; os.chdir({str(tmp_path)!r})\nfrom wsi_trainer.cli import main\nimport contextlib, io, sys\n"
    code += "error = io.StringIO()\nwith contextlib.redirect_stderr(error):\n    assert main(sys.argv[1:]) == 2\n"
    code += f"assert {said!r} in error.getvalue(), error.getvalue()"
    assert imported(code, "fit", *words) == set()


@pytest.mark.parametrize("group", GROUPS)
def test_the_keys_are_those_of_the_parser(group: str) -> None:
    keys = {key.split(".")[1] for key in keys_of(make_parser("fit", "")) if key.startswith(f"{group}.")}
    assert set(keys_of_group(group)) == keys
