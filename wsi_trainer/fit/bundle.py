"""One zip that says enough of a run to ask for help with it, and nothing of its slides, patients, users and folders.

It is put together from files that the run wrote as text and JSON; no image is ever opened for it. Fields of the log
that are names are left out. What may hold a name within a sentence is blotted: every cell of the run's table of slides
but those of `KNOWN`, the user, the host, and everything that looks like a path. A run without that table keeps its
sentences to itself, since nobody can say which words of them are names.
"""

from __future__ import annotations

import itertools
import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from wsi_trainer import __version__
from wsi_trainer.debugging import ASKED
from wsi_trainer.doctor.command import examine
from wsi_trainer.errors import UserError
from wsi_trainer.fit.events import read_events
from wsi_trainer.fit.run_folder import RunFolder, read_json
from wsi_trainer.foreign import read_yaml
from wsi_trainer.tables import read_table
from wsi_trainer.terminal import say

LAST = 500
"""Records of the log."""
KNOWN = ("split", "label", "mpp")
"""Columns of the table of slides that are no names."""
NAMES = ("slide", "host", "user")
"""Fields of the log that are names."""
_PATH = re.compile(r"[^\s'\"]*[/\\][^\s'\"]*")
_WITHHELD = "(withheld: the run has no table of slides, by which names could be told)"


@contextmanager
def offering(run: Path) -> Iterator[None]:
    """In this context a run that fails leaves a bundle in its folder where the user gave `--debug`. Where the fault is
    not the user's, and nothing was asked for, it is said how one is made."""
    try:
        yield
    except Exception as error:
        console = Console(stderr=True)
        if ASKED.get():
            try:
                target = unused(run)
                write_bundle(run, target)
                say(
                    console,
                    f"{target} holds what somebody who helps you needs to know: look into it before you send it",
                )
            except (UserError, OSError) as refused:  # which is less than what has failed
                say(console, f"no bundle could be written: {refused}")
        elif not isinstance(error, UserError):
            say(console, f"`wsi-train status {run} --bundle help.zip` writes what somebody who helps you needs to know")
        raise


def unused(run: Path) -> Path:
    """A name for the bundle of a run that may have failed before."""
    names = itertools.chain(["bundle"], (f"bundle-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := run / f"{name}.zip").exists())


class Blot:
    """Replaces names and paths within texts; numbers and truth values pass."""

    def __init__(self, names: Iterable[str]) -> None:
        longest = sorted({name for name in names if name.strip()}, key=len, reverse=True)
        joined = "|".join(re.escape(name) for name in longest)
        self._names = re.compile(rf"(?<!\w)(?:{joined})(?!\w)", re.IGNORECASE) if longest else None

    def __call__(self, thing: Any) -> Any:
        """The same thing with its texts blotted, keys included."""
        if isinstance(thing, str):
            text = self._names.sub("<name>", thing) if self._names else thing
            return _PATH.sub("<path>", text)
        if isinstance(thing, dict):
            return {self(key): self(value) for key, value in thing.items()}
        return [self(one) for one in thing] if isinstance(thing, list | tuple) else thing


def write_bundle(run: Path, target: Path) -> list[str]:
    """Write the bundle of a run and return the names of what is in it."""
    folder = RunFolder(run).existing()
    if target.exists():
        raise UserError(f"{target} is there already; choose another --bundle")
    records = read_events(folder.events)
    config = read_yaml(folder.config)
    names = set(names_of(folder))
    told = bool(names)
    names |= {str(record[field]) for record in records for field in NAMES if record.get(field)}
    names |= {Path.home().name, *paths_in(config), str(run), str(run.resolve())}
    blot = Blot(names)
    contents = {
        "about.json": {"wsi_trainer": __version__, "environment": read_json(folder.environment)},
        "config.json": blot(config),
        "plan.json": blot(read_json(folder.plan)),
        "estimate.json": blot(read_json(folder.estimate)),
        "memory.json": blot(read_json(folder.memory)),
        "doctor.json": blot([asdict(check) for check in examine()]),
        "events.json": [anonymous(record, blot, told) for record in records[-LAST:]],
    }
    partial = target.with_suffix(target.suffix + ".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in contents.items():
            file.writestr(name, json.dumps(content, indent=2, default=str))
    partial.replace(target)
    return list(contents)


def names_of(folder: RunFolder) -> list[str]:
    """The cells of the run's table of slides that may be names, and the names of their files."""
    if not folder.splits.is_file():
        return []
    cells = [row[column] for _, row in read_table(folder.splits).rows for column in row if column not in KNOWN]
    files = [Path(cell) for cell in cells if "/" in cell or "\\" in cell]
    return [*cells, *(file.name for file in files), *(file.stem for file in files)]


def paths_in(thing: Any) -> list[str]:
    """The texts in a config that are paths."""
    if isinstance(thing, str):
        return [thing] if _PATH.search(thing) else []
    inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list) else ()
    return [path for one in inner for path in paths_in(one)]


def anonymous(record: dict[str, Any], blot: Blot, told: bool) -> dict[str, Any]:
    """A record of the log without names."""
    kept = {name: value for name, value in record.items() if name not in NAMES}
    if "text" in kept:
        kept["text"] = blot(kept["text"]) if told else _WITHHELD
    return kept | ({"resume": kept["resume"] is not None} if "resume" in kept else {})
