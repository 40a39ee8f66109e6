"""No name reaches the terminal as markup or as a control code."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from wsi_trainer.cli import main
from wsi_trainer.io.display import clean, is_text, say
from wsi_trainer.io.tables import read_table

PACKAGE = Path(__file__).resolve().parents[2] / "wsi_trainer"


@given(st.text(st.characters(codec=None, categories=None)))
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = clean(text)
    assert not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in shown)
    shown.encode()
    if text.isalnum() and is_text(text):
        assert shown == text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("S-12[he].svs", "S-12[he].svs"),
        ("[/x].svs", "[/x].svs"),
        (":x: :warning:", ":x: :warning:"),
        ("a\x1b[31mred", "a\\x1b[31mred"),
        ("two\nlines\tand tabs", "two\\nlines\\tand tabs"),
        ("M\udcfcller.svs", "M\\xfcller.svs"),
        ("\u202egnp.svs", "\\u202egnp.svs"),
    ],
)
def test_names_are_shown_as_they_are(name: str, shown: str) -> None:
    stream = io.StringIO()
    say(Console(file=stream, force_terminal=True, color_system="truecolor", width=200), name)
    assert stream.getvalue() == f"{shown}\n"


def test_there_is_one_door() -> None:
    """No text that is put together is printed by rich but through `say` and `cell`: the others are constants."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if node.func.attr in ("print", "rule") and "onsole" in owner:
                    assert not any(isinstance(part, ast.JoinedStr) for part in node.args[:1]) or (
                        node.func.attr == "rule"
                    ), f"{path}: {ast.unparse(node)}"


def _cohort(folder: Path) -> Path:
    (folder / "[").mkdir(parents=True)
    for name in ("[/x].svs", "S-12[he].svs", "a\x1b[31m.svs", ":x:.svs", "=1+1.svs"):
        (folder / name).write_bytes(b"nothing")
    (folder / "M\udcfcller.svs").write_bytes(b"nothing")
    return folder


def test_strange_names_are_reported_and_end_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _cohort(tmp_path / "slides")
    assert main(["preprocess", str(folder), str(tmp_path / "out"), "--workers", "1", "--stall-minutes", "0"]) == 1
    shown = capsys.readouterr().out
    assert "\x1b[31m.svs" not in shown and "❌" not in shown
    for name in ("[/x].svs", "S-12[he].svs", "a\\x1b[31m.svs", ":x:.svs", "M\\xfcller.svs: its name is not UTF-8"):
        assert name in shown
    failures = [row["slide"] for _, row in read_table(tmp_path / "out" / "failures.csv").rows]
    assert len(failures) == 6
    assert any(name.endswith("M\\xfcller.svs") for name in failures)


def test_an_error_is_clean_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "a\x1b[31m[/x]")]) == 2
    assert "a\\x1b[31m[/x] is not a folder" in capsys.readouterr().err
