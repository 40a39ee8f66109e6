"""`wsi-train --help` lists every command and imports nothing that is slow to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from jsonargparse import ArgumentParser

from wsi_trainer.cli import COMMANDS, main
from wsi_trainer.cli.parsing import keys_of

HEAVY = (
    "torch",
    "pytorch_lightning",
    "lightning",
    "zarr",
    "openslide",
    "numpy",
    "jsonargparse",
    "lightning_plugin",
)
PROGRAM = """
import contextlib, io, json, sys
from wsi_trainer.cli import main
with contextlib.redirect_stdout(io.StringIO()) as shown:
    codes = [main([word]) for word in ("--help", "-h", "--version")]
print(json.dumps({"codes": codes, "shown": shown.getvalue(), "modules": sorted(sys.modules)}))
"""


def test_help_imports_nothing_heavy():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    result = json.loads(run.stdout)
    assert result["codes"] == [0, 0, 0]
    assert "wsi-train" in result["shown"]
    assert [name for name in HEAVY if name in result["modules"]] == []


def test_a_reader_that_goes_away_is_no_error():
    program = "import sys; from wsi_trainer.cli import main; sys.exit(main(['--help']))"
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run([sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (run.returncode, run.stderr) == (141, "")


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command.name} " in shown
        assert command.help in shown


def test_no_command_shows_help_and_fails(capsys):
    assert main([]) == 2
    assert "usage: wsi-train COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.target], ids=lambda command: command.name)
def test_every_command_has_help(command, capsys):
    assert main([command.name, "--help"]) == 0
    assert "usage:" in capsys.readouterr().out


class Built(BaseException):
    """Raised where a command would parse its words."""


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.target], ids=lambda command: command.name)
def test_every_option_of_every_command_is_explained(command, monkeypatch):
    seen = []

    def note(parser, *_, **__):
        seen.append(parser)
        raise Built

    monkeypatch.setattr(ArgumentParser, "parse_args", note)
    with pytest.raises(Built):
        main([command.name])
    (parser,) = seen
    texts = {action.dest: (action.help or "").strip() for action in parser._actions}
    assert parser.description and "help" in texts
    assert [key for key in keys_of(parser) if texts[key] in ("", "==SUPPRESS==")] == []


# -- modules that are imported before a command does anything: torch and Lightning take seconds, a table takes none


SLOW = ("torch", "pytorch_lightning", "lightning_plugin", "torchmetrics", "sklearn", "scipy.stats", "pandas")
COMPUTE = {"plan", "fit", "embed", "export", "validate", "test", "predict", "segment", "heatmap", "demo", "deploy"}
"""Commands that train or predict."""


def test_a_command_that_computes_nothing_imports_no_torch() -> None:
    modules = [row.target.partition(":")[0] for row in COMMANDS if row.name not in COMPUTE and row.target]
    code = f"""
import importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
    assert not [name for name in {SLOW!r} if name in sys.modules], module
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]
