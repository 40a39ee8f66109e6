"""The subcommands of `wsi-train`, one row each, and the way from the words on the command line to an exit code.

How to add a subcommand:

1. Write a function with typed arguments and a docstring with an `Args:` section, in the folder it belongs to,
   e.g. `def verify(store: Path, workers: int = 2) -> int | None` in `wsi_trainer/preprocess/verify.py`.
   Arguments without a default become positional, the others options; a dataclass becomes a group of options.
   `--config FILE.yaml`, `--print_config` and `--help` come by themselves. Return an exit code, or None for 0.
2. Point its row below at `"module:function"`. The module is imported only when the command is chosen, so
   `wsi-train --help` stays fast and imports no torch; import what is heavy wherever you like.
3. Report what the user can mend with `raise UserError("one line: what, where, the way out")`.
4. A command with a parser of its own (LightningCLI) sets `own_parser=True` and is called as `function(argv)`;
   it turns what its parser raises into a UserError with `explain(parser, error, argv)` of `cli.parsing`.
5. Test it with `main([...])`, which returns the exit code.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from wsi_trainer import __version__
from wsi_trainer.errors import ASKED, UserError, about_disk
from wsi_trainer.io.display import clean, speakable
from wsi_trainer.signals import stops_once


@dataclass(frozen=True)
class Command:
    """A row: the subcommand's name, one line of help, and where its function is."""

    name: str
    help: str
    target: str
    own_parser: bool = False


COMMANDS: tuple[Command, ...] = (
    Command(
        "demo",
        "make slides, train on them, and write the report: everything once, in a few minutes",
        "wsi_trainer.demo:demo",
    ),
    Command(
        "doctor",
        "what is installed, which device, which readers and codecs work, what is missing",
        "wsi_trainer.doctor:doctor",
    ),
    Command(
        "preprocess",
        "convert slides to zarr: checked, resumable, background for free",
        "wsi_trainer.preprocess.command:preprocess",
    ),
    Command(
        "tissue",
        "find the tissue of slides without converting them: a page of all masks, outlines to edit in QuPath",
        "wsi_trainer.preprocess.tissue:tissue",
    ),
    Command(
        "verify",
        "read converted slides again and compare them with their manifest of hashes",
        "wsi_trainer.preprocess.verify:verify",
    ),
    Command(
        "plan",
        "plan a model at an image size under a memory budget, without a device or an image",
        "wsi_trainer.fit.plan:plan",
        own_parser=True,
    ),
    Command(
        "fit",
        "train a slide classifier end to end",
        "wsi_trainer.fit.command:fit",
        own_parser=True,
    ),
    Command(
        "status",
        "how far a run is that goes on elsewhere: progress, time left, memory, the last error",
        "wsi_trainer.fit.status:status",
    ),
    Command(
        "embed",
        "write features of patches by an encoder that is not trained, for fit, CLAM, TRIDENT and STAMP",
        "wsi_trainer.embed:embed",
        own_parser=True,
    ),
    Command(
        "export",
        "write the model of a run alone, with its model card, or its encoder as a file of weights",
        "wsi_trainer.fit.evaluate:export",
        own_parser=True,
    ),
    Command(
        "validate",
        "evaluate a checkpoint on the validation split",
        "wsi_trainer.fit.evaluate:validate",
        own_parser=True,
    ),
    Command(
        "test",
        "evaluate a checkpoint on the test split, with confidence intervals",
        "wsi_trainer.fit.evaluate:test",
        own_parser=True,
    ),
    Command(
        "deploy",
        "another hospital's slides by one run, several, or the folds of a study: scores beside the runs' own, a page",
        "wsi_trainer.deploy:deploy",
        own_parser=True,
    ),
    Command(
        "predict",
        "write a prediction for each slide",
        "wsi_trainer.fit.evaluate:predict",
        own_parser=True,
    ),
    Command(
        "segment",
        "write the predicted class of each pixel of whole slides, for models trained on drawn regions",
        "wsi_trainer.segment.predict:segment",
        own_parser=True,
    ),
    Command(
        "heatmap",
        "write exact whole-slide maps of what the model looked at",
        "wsi_trainer.explain.heatmaps:heatmap",
        own_parser=True,
    ),
    Command(
        "report",
        "write the HTML report of a run, a cross-validation or a deployment",
        "wsi_trainer.report.command:report",
    ),
    Command(
        "view",
        "look at slides, maps and predictions in a browser",
        "wsi_trainer.view.command:view",
    ),
)


DEBUG_FLAG = "--debug"
USAGE_EXIT = 2
FAULT_EXIT = 70
INTERRUPTED_EXIT = 130
BROKEN_PIPE_EXIT = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run `wsi-train` with these arguments (those of the process by default) and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        speakable(stream)
    words = list(sys.argv[1:] if argv is None else argv)
    debug = DEBUG_FLAG in words
    with stops_once():
        return outcome([word for word in words if word != DEBUG_FLAG], debug)


def outcome(words: list[str], debug: bool) -> int:
    """Run a command; its errors are one line and an exit code."""
    thread_errors, before = threading.excepthook, ASKED.set(debug)
    if not debug:
        threading.excepthook = in_a_thread
    try:
        code = dispatch(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        print(f"wsi-train: {stop if str(stop) else 'interrupted'}", file=sys.stderr)
        return int(getattr(stop, "exit_code", INTERRUPTED_EXIT))
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does: nothing is left to be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_EXIT
    except SystemExit as stop:  # argparse ends the process after --help
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        if debug:
            traceback.print_exc()
        mendable = as_user_error(error) or fault(error, debug)
        print(f"wsi-train: error: {clean(' '.join(str(mendable).split()))}", file=sys.stderr)
        return mendable.exit_code
    finally:
        threading.excepthook = thread_errors
        ASKED.reset(before)


def in_a_thread(failed: threading.ExceptHookArgs) -> None:
    """Print in one line the error that ends a thread of a library, such as one that writes curves."""
    text = " ".join(str(failed.exc_value).split()) or failed.exc_type.__name__
    print(f"wsi-train: warning: {clean(text)} ({failed.thread.name if failed.thread else 'a thread'})", file=sys.stderr)


def dispatch(words: list[str]) -> int:
    """Choose the subcommand by the first word and call it with the rest."""
    if not words or words[0] in ("-h", "--help"):
        print(help_text())
        return 0 if words else USAGE_EXIT
    if words[0] == "--version":
        print(f"wsi-train {__version__}")
        return 0
    return call(find(words[0]), with_own_configs(with_underscores(words[1:])))


def with_underscores(words: list[str]) -> list[str]:
    """The words with their options spelled as the parsers know them; either spelling will do."""
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--") and len(name) > 2:
            name = "--" + name[2:].replace("-", "_")
        found.append(name + equals + value)
    return found


def own_configs() -> Path:
    """The folder `configs`: a wheel puts it into the package, and in a clone it lies beside the package."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def with_own_configs(words: list[str]) -> list[str]:
    """The words with each `--config configs/NAME.yaml` as a file, also where the working folder has none of that name.

    `./configs/NAME.yaml` and every other path mean the working folder alone.
    """
    found = []
    for before, word in zip(["", *words], words):
        option, equals, path = word.partition("=") if word.startswith("--config=") else (before, "", word)
        if option == "--config" and path.startswith("configs/") and not Path(path).exists():
            own = own_configs() / path.removeprefix("configs/")
            word = f"{option}=" * bool(equals) + str(own) if own.is_file() else word
        found.append(word)
    return found


def find(name: str) -> Command:
    """The row with this name, or an error with the nearest one."""
    names = [command.name for command in COMMANDS]
    if name in names:
        return COMMANDS[names.index(name)]
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    kind = "option" if name.startswith("-") else "command"
    raise UserError(f"unknown {kind} '{name}'; {hint}the commands are: {', '.join(names)}")


def call(command: Command, words: list[str]) -> int:
    """Import the command's function and run it on the remaining words."""
    module_name, _, function_name = command.target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    if command.own_parser:
        return int(function(words) or 0)
    from wsi_trainer.cli.parsing import run  # jsonargparse is slow to import: only when a command runs

    return int(run(function, command.name, command.help, words) or 0)


def help_text() -> str:
    """The text of `wsi-train --help`."""
    width = max(len(command.name) for command in COMMANDS)
    rows = "\n".join(f"  {command.name:<{width}}  {command.help}" for command in COMMANDS)
    return (
        "usage: wsi-train COMMAND [OPTIONS]\n\n"
        "Train deep networks end to end on whole slides, exactly, within a memory budget.\n\n"
        f"commands:\n{rows}\n\n"
        "options:\n"
        "  -h, --help  this text; `wsi-train COMMAND --help` shows the options of a command\n"
        "  --version   the version\n"
        f"  {DEBUG_FLAG}     show the traceback of an error"
    )


def as_user_error(error: Exception) -> UserError | None:
    """The error as one the user can mend, or None if it is a bug."""
    if isinstance(error, UserError):
        return error
    if is_engine_error(error):
        return UserError(str(error))
    if isinstance(error, RecursionError):
        return UserError(f"{error}: the input is too large or nested too deep")
    if isinstance(error, OSError) and not error.strerror and str(error):
        return UserError(str(error))  # a library tells of the system in its own words
    if isinstance(error, OSError) and error.strerror:
        return UserError(about_disk(error))
    if isinstance(error, MemoryError | RuntimeError):
        return at_the_limits(error)
    return None


OF_THE_SYSTEM = re.compile(r"errno = (\d+)")
"""How HDF5 tells of a full disk and of whatever else the system refused."""
ASKED_BYTES = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes|out of memory")
"""How PyTorch tells of memory that the system or the device refused."""


def at_the_limits(error: MemoryError | RuntimeError) -> UserError | None:
    """The error to show for one of a library's, of no kind of its own, where memory is short or the disk full."""
    said = str(error).partition("\n")[0].removesuffix(".")
    if number := OF_THE_SYSTEM.search(str(error)):
        return UserError(about_disk(OSError(int(number[1]), os.strerror(int(number[1])))))
    if (asked := ASKED_BYTES.search(str(error))) and asked[1]:
        said = f"{int(asked[1]):,} bytes were asked for at once"
    if asked or isinstance(error, MemoryError):
        return UserError(f"memory is short: {said or 'no more could be had'}; end other programs, or ask for less at a "
                         "time, on a device by a smaller budget")  # fmt: skip
    return None


def fault(error: Exception, debug: bool) -> UserError:
    """A bug in one line; where it is not shown, the traceback is kept in a file."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno}). This is a fault"
    if not debug:
        try:
            with tempfile.NamedTemporaryFile(
                "w", prefix="wsi-train-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
            ) as file:
                file.write("".join(traceback.format_exception(error)))
            text += f" of wsi-train or of your own code; its traceback is in {file.name}"
        except OSError:
            text += f" of wsi-train or of your own code; {DEBUG_FLAG} shows its traceback"
    return UserError(text, exit_code=FAULT_EXIT)


def is_engine_error(error: BaseException) -> bool:
    """True for an error of the engine, such as a budget that cannot be kept; it is asked only if imported."""
    engine = sys.modules.get("lightning_plugin")
    kinds = [getattr(engine, name, None) for name in ("BudgetError", "EngineError")]
    return any(isinstance(kind, type) and isinstance(error, kind) for kind in kinds)
