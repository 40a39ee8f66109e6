"""Result: what a command made of slides with a checkpoint: its place, what it is of, and how far it is.

Results of different checkpoints, cohorts, splits and kinds lie side by side, at the places of version 1.0 where that
could name them. Beside each lies one JSON that says what it is of. While it is made, a journal there has a line for
each finished slide, from which the same command goes on after a kill.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.files import Locked, as_written, lock, read_json, write_json, write_text
from wsi_trainer.io.untrusted import read_text
from wsi_trainer.slide.identity import SlideId

Kind = Literal["test", "predict", "heatmap", "segment"]
LESION_SCORES = "scores.json"
LESIONS = "lesions.csv"
MAPS = "heatmaps.json"
"""The list of maps in the folder of a method."""
SEGMENTS = "segments.json"
"""The list of slides in the folder of what `segment` found."""
SPEED = frozenset(
    f"overrides.{key}"
    for key in (
        "data.workers", "data.ahead", "data.on_error", "train.budget", "train.compile", "train.trim",
        "train.accelerator", "train.devices", "train.loggers", "train.resamples", "train.decision",
    )
)  # fmt: skip
"""Overrides with which an unfinished result may go on: a slide has the same numbers with and without."""


@dataclass(frozen=True)
class Result:
    """The place of a result."""

    root: Path
    """The folder of results of a run or a cohort, with one checkpoint."""
    kind: Kind
    split: str = "test"
    method: str = ""
    """Of a heat map: METHOD, or METHOD-TARGET."""

    @classmethod
    def found(cls, root: Path) -> list[Result]:
        """The results in a folder that are whole, as far as their files tell; first those on test."""
        maps, segments = root / "heatmaps", root / "segments"
        found = [cls(root, "test", path.stem) for path in sorted((root / "evaluation").glob("*.json"))]
        found += [cls(root, "predict"), cls(root, "segment")]
        found += [cls(root, "segment", path.parent.name) for path in sorted(segments.glob(f"*/{SEGMENTS}"))]
        found += [cls(root, "heatmap", "test", path.parent.name) for path in sorted(maps.glob(f"*/{MAPS}"))]
        folders = [path.parent for path in sorted(maps.glob(f"*/*/{MAPS}"))]
        found += [cls(root, "heatmap", folder.parent.name, folder.name) for folder in folders]
        return [one for one in found if one.whole]

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        if self.kind in ("test", "predict"):
            return self.root / "predictions" if self.kind == "test" else self.root
        kinds = self.root / ("heatmaps" if self.kind == "heatmap" else "segments")
        return (kinds if self.split == "test" else kinds / self.split) / self.method

    @property
    def file(self) -> Path:
        """Its table, or the list of its files."""
        names = {"test": f"{self.split}.csv", "predict": "predictions.csv", "heatmap": MAPS, "segment": SEGMENTS}
        return self.folder / names[self.kind]

    @property
    def scores(self) -> Path:
        """The file with its scores."""
        return self.root / "evaluation" / f"{self.split}.json" if self.kind == "test" else self.folder / LESION_SCORES

    @property
    def last(self) -> Path:
        """The file that is written last."""
        return self.scores if self.kind == "test" else self.file

    @property
    def whole(self) -> bool:
        """True once it was finished."""
        return self.last.is_file()

    @property
    def about(self) -> Path:
        """The file that says what it is of; version 1.0 wrote none."""
        return self.file.with_suffix(".json") if self.file.suffix == ".csv" else self.folder / "result.json"

    @property
    def of(self) -> dict[str, Any]:
        """Facts of the result; empty for one of version 1.0."""
        return read_json(self.about)

    @property
    def journal(self) -> Path:
        """The slides that are finished, while others are not."""
        return self.about.with_suffix(".unfinished")

    def share_of(self, slides: int) -> float:
        """The share of so many slides that is finished, from 0 to 1."""
        _, entries = _read(self.journal)
        return len(entries) / max(slides, 1) if self.journal.is_file() else float(self.whole)

    @contextmanager
    def locked(self, overwrite: bool) -> Iterator[None]:
        """Keep other processes from making this result; the system lifts this when the process dies.

        Args:
            overwrite: Whether to replace a result that is whole.

        Raises:
            UserError: Another process makes it, or it is whole.
        """
        with ExitStack() as held:
            try:
                held.enter_context(lock(self.about.with_name(f".{self.about.stem}.lock"), 0))
            except Locked as error:
                raise UserError(
                    f"{self.last} is being made by another command; wait for its end, or give other slides another "
                    "--name"
                ) from error
            self.keep(overwrite)
            yield

    def keep(self, overwrite: bool) -> None:
        """Refuse to replace a result of an earlier command that is whole."""
        if self.whole and not self.journal.is_file() and not overwrite:
            raise UserError(f"{self.last} is there already; give --overwrite to write it again")


class Work:
    """A result that is being made: its finished slides, which outlive the process."""

    def __init__(
        self, result: Result, of: Mapping[str, Any], seals: Mapping[str, str], overwrite: bool = False
    ) -> None:
        """Go on with what an earlier process left unfinished, or begin.

        Args:
            result: Its place.
            of: What it is of.
            seals: By slide, or patient, a hash of what its entry depends on.
            overwrite: Whether to replace a result that is whole, or one of something else that is unfinished.

        Raises:
            UserError: There is such a result.
        """
        result.keep(overwrite)
        self.result = result
        self.of: dict[str, Any] = json.loads(json.dumps(of, default=str))
        self._seals = seals
        self._entries: dict[str, tuple[str, Any]] = {}
        before, entries = _read(result.journal)
        other = None if before is None else next(_differences(before, self.of), None)
        if other is not None and not overwrite:
            raise UserError(
                f"{result.journal} is what an earlier command has left unfinished, with {other}; give that command "
                "again to finish it, or --overwrite to begin anew"
            )
        if before is not None and other is None:
            self._entries = entries
        elif result.kind in ("heatmap", "segment"):  # whose files are replaced one by one
            for path in (result.last, result.about):
                path.unlink(missing_ok=True)
        lines = [self.of, *([slide, *entry] for slide, entry in self._entries.items())]
        write_text(result.journal, "".join(f"{json.dumps(line)}\n" for line in lines))

    def entry(self, record: SlideRecord) -> Any:
        """The entry of a slide that is finished; None of any other."""
        seal, entry = self._entries.get(record.slide, ("", None))
        return entry if seal == self._seals[record.slide] else None

    def add(self, record: SlideRecord, entry: Any) -> Any:
        """Keep the entry of a slide whose files are written; returns it as it is read from the journal."""
        line = json.dumps([record.slide, self._seals[record.slide], entry])
        with self.result.journal.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        _, seal, entry = json.loads(line)
        self._entries[record.slide] = seal, entry
        return entry

    def each(
        self, records: Iterable[SlideRecord], make: Callable[[SlideRecord], Any], on_error: Literal["stop", "skip"]
    ) -> dict[str, str]:
        """Make the entry of each slide that has none; returns why others were left out.

        Args:
            records: The slides.
            make: Writes the files of a slide; returns its entry.
            on_error: Whether the command goes on without a slide that cannot be read.
        """
        skipped: dict[str, str] = {}
        for record in records:
            if self.entry(record) is not None:
                continue
            try:
                self.add(record, make(record))
            except SlideError as error:
                if on_error == "stop":
                    raise
                skipped[record.slide] = error.reason
        return skipped

    def finished(self, records: Iterable[SlideRecord]) -> list[tuple[SlideRecord, Any]]:
        """The slides that are finished, and the entry of each."""
        return [(record, entry) for record in records if (entry := self.entry(record)) is not None]

    def finish(self) -> None:
        """Say beside the result what it is of: its tables are written, and nothing is left to go on with."""
        write_json(self.result.about, self.of)
        self.result.journal.unlink()


def seals_of(records: Sequence[SlideRecord], known: Mapping[str, SlideId]) -> dict[str, str]:
    """By slide, or patient, a hash of all that its entry depends on.

    Args:
        records: The slides or patients.
        known: Hashes of slides that are kept; those of others are computed.
    """
    seals = {}
    for record in records:
        parts = record.parts or (record,)
        content = [(known.get(one.slide) or one.identity()).content for one in parts]
        said = [[*one.cells.items(), one.finest] for one in parts]
        seals[record.slide] = hashlib.sha256(repr((content, said)).encode()).hexdigest()
    return seals


def _read(journal: Path) -> tuple[dict[str, Any] | None, dict[str, tuple[str, Any]]]:
    """The facts that a journal begins with, and its entries; the line that a process died in does not count."""
    if not journal.is_file():
        return None, {}
    with as_written(journal):
        lines = read_text(journal).split("\n")[:-1]
        if not lines:
            return None, {}
        found = [json.loads(line) for line in lines[1:]]
        return dict(json.loads(lines[0])), {str(slide): (str(seal), entry) for slide, seal, entry in found}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """Differences between the facts of two results that decide their numbers, in words."""
    for key in dict.fromkeys([*before, *now]):
        one, other, key = before.get(key), now.get(key), f"{name}{key}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{key}.")
        elif one != other and key not in SPEED:
            yield f"{key} {one} instead of {other}"


def read_lesion_scores(folder: Path, split: str) -> dict[str, Any]:
    """The scores of a split in scores.json; empty where there are none."""
    scores = read_json(folder / LESION_SCORES)
    return scores if scores.get("split") == split else {}
