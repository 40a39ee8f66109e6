"""Bad input ends with exit code 2 and one line on stderr that names it and what is valid; no traceback."""

import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from wsi_trainer import cli
from wsi_trainer.cli import Command, main
from wsi_trainer.errors import UserError


@dataclass
class Optimizer:
    """How weights are updated.

    Args:
        rate: the learning rate
    """

    rate: float = 0.1


DEFAULT_OPTIMIZER = Optimizer()


class Stain:
    """A colour model, chosen by its import path.

    Args:
        strength: how strong
    """

    def __init__(self, strength: float = 1.0) -> None:
        self.strength = strength


def cook(
    slide: Path,
    codec: Literal["zstd", "jpeg"] = "zstd",
    workers: int = 2,
    quiet: bool = False,
    optimizer: Optimizer = DEFAULT_OPTIMIZER,
    patience: int | None = None,
    crop: tuple[int, int] = (1, 1),
    stain: Stain | None = None,
) -> int | None:
    """A command made for these tests.

    Args:
        slide: what to read
        codec: how to compress
        workers: how many processes
        quiet: print nothing
        optimizer: how weights are updated
        patience: how long to wait
        crop: height and width
        stain: the colour model
    """
    if codec == "jpeg":
        raise UserError(f"{slide}: cannot be\nwritten as jpeg", exit_code=3)
    if workers == 0:
        raise ZeroDivisionError("a bug")
    text = slide.read_text()
    if not quiet:
        print(text, workers, optimizer.rate)
    return None


def cook_by_itself(argv: list[str]) -> int:
    """A command with a parser of its own."""
    print("itself", *argv)
    return 7


@pytest.fixture(autouse=True)
def table(monkeypatch):
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "kitchen", module)
    rows = (
        Command("cook", "cook a slide", "kitchen:cook"),
        Command("self", "cook otherwise", "kitchen:cook_by_itself", own_parser=True),
    )
    monkeypatch.setattr(cli, "COMMANDS", rows)


@pytest.fixture
def slide(tmp_path):
    path = tmp_path / "slide.txt"
    path.write_text("pixels")
    return path


def one_line(capsys) -> str:
    """What was written to stderr, which must be one line without a traceback."""
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.err
    assert shown.err.startswith("wsi-train: error: ")
    return shown.err


def test_good_input_runs(slide, capsys):
    assert main(["cook", str(slide), "--workers", "3", "--optimizer.rate=0.5"]) == 0
    assert capsys.readouterr().out == "pixels 3 0.5\n"


def test_config_gives_options_and_command_line_wins(slide, tmp_path, capsys):
    config = tmp_path / "good.yaml"
    config.write_text(f"slide: {slide}\nworkers: 5\noptimizer:\n  rate: 0.25\n")
    assert main(["cook", "--config", str(config)]) == 0
    assert capsys.readouterr().out == "pixels 5 0.25\n"
    assert main(["cook", "--config", str(config), "--workers=6"]) == 0
    assert capsys.readouterr().out == "pixels 6 0.25\n"


@pytest.mark.parametrize("flag", [["--quiet"], ["--quiet", "true"], ["--quiet=true"]])
def test_a_flag_needs_no_value(slide, flag, capsys):
    assert main(["cook", *flag, str(slide)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("codek: zstd\n", ["unknown key 'codek'", "did you mean 'codec'?", "workers"]),
        ("optimizer:\n  rates: 1\n", ["unknown key 'optimizer.rates'", "did you mean 'optimizer.rate'?"]),
        ("patience: long\n", ["patience", "'long' is not valid", "expected int or null"]),
        ("crop: [1]\n", ["crop", "'[1]' is not valid", "tuple with 2 elements"]),
        ("stain: {class_path: kitchen.Stian}\n", ["stain", "class_path 'kitchen.Stian'", "no attribute"]),
        (
            "stain: {class_path: kitchen.Stain, init_args: {strenth: 2}}\n",
            ["stain", "unknown key 'strenth' for kitchen.Stain", "did you mean 'strength'?"],
        ),
        ("codec: zip\n", ["codec", "'zip' is not valid", "expected 'zstd', 'jpeg'"]),
        ("workers: many\n", ["workers", "'many' is not valid", "expected int"]),
        ("workers: [1\nb: }\n", ["line 1", "line 2"]),
    ],
)
def test_wrong_config_names_key_and_file(slide, tmp_path, capsys, text, named):
    config = tmp_path / "bad.yaml"
    config.write_text(text)
    assert main(["cook", str(slide), "--config", str(config)]) == 2
    line = one_line(capsys)
    for part in [*named, str(config)]:
        assert part in line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--codec", "zip"], ["codec", "'zip' is not valid", "expected 'zstd', 'jpeg'"]),
        (["--workers", "many"], ["workers", "'many' is not valid", "expected int"]),
        (["--wokers", "3"], ["unknown argument '--wokers'", "did you mean '--workers'?", "--codec"]),
        (["--optimizer.rates=3"], ["unknown argument '--optimizer.rates'", "'--optimizer.rate'?"]),
        (["--workers"], ["--workers", "expected one argument"]),
        (["--config", "nowhere.yaml"], ["config: File does not exist", "nowhere.yaml"]),
        (["another", "word"], ["unknown argument 'another'"]),
    ],
)
def test_wrong_words_are_named(slide, capsys, words, named):
    assert main(["cook", str(slide), *words]) == 2
    line = one_line(capsys)
    for part in named:
        assert part in line


def test_missing_argument_is_named(capsys):
    assert main(["cook"]) == 2
    assert "slide" in one_line(capsys)


def test_missing_file_is_named(tmp_path, capsys):
    missing = tmp_path / "missing.svs"
    assert main(["cook", str(missing)]) == 2
    assert f"{missing}: No such file or directory" in one_line(capsys)


def test_user_error_keeps_its_exit_code_and_becomes_one_line(slide, capsys):
    assert main(["cook", str(slide), "--codec=jpeg"]) == 3
    assert "cannot be written as jpeg" in one_line(capsys)


def test_unknown_command_names_the_nearest(capsys):
    assert main(["cok"]) == 2
    line = one_line(capsys)
    assert "did you mean 'cook'?" in line
    assert "cook, self" in line


@pytest.mark.parametrize("words", [["--debug", "cook"], ["cook", "--debug"]])
def test_debug_shows_the_traceback(tmp_path, capsys, words):
    assert main([*words, str(tmp_path / "missing.svs")]) == 2
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert "read_text" in shown
    assert shown.splitlines()[-1].startswith("wsi-train: error: ")


def test_a_bug_is_one_line_and_its_traceback_is_kept(slide, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["cook", str(slide), "--workers=0"]) == 70
    assert "ZeroDivisionError: a bug (test_bad_input.py" in one_line(capsys)
    (kept,) = tmp_path.glob("wsi-train-*.txt")
    assert "Traceback (most recent call last)" in kept.read_text()
    assert main(["cook", str(slide), "--workers=0", "--debug"]) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    assert len(list(tmp_path.glob("wsi-train-*.txt"))) == 1


def test_own_parser_gets_the_words(capsys):
    assert main(["self", "--a", "b"]) == 7
    assert capsys.readouterr().out == "itself --a b\n"


def test_interrupt_ends_without_traceback(slide, capsys, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "call", interrupt)
    assert main(["cook", str(slide)]) == 130
    assert capsys.readouterr().err == "wsi-train: interrupted\n"


@pytest.mark.parametrize(
    ("name", "code", "said"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "ended by SIGTERM")]
)
def test_more_of_ctrl_c_does_not_break_off_what_is_said(slide, capsys, monkeypatch, name, code, said):
    def interrupted(*_: object) -> None:
        try:
            signal.raise_signal(getattr(signal, name))
        finally:
            signal.raise_signal(signal.SIGINT)

    untouched = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in untouched.items()}
    monkeypatch.setattr(cli, "call", interrupted)
    try:
        assert main(["cook", str(slide)]) == code
        assert capsys.readouterr().err == f"wsi-train: {said}\n"
        assert all(signal.getsignal(number) is handler for number, handler in untouched.items())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
