"""The manifest: a CSV file with one line for each slide, and its slides as records.

Columns: `slide` (its name, and its path relative to the manifest or to a folder given), those of the task (`label`, or
`time` and `event`, say; `regions` names a file as `slide` does), and optionally `path` (where the name is not the
path), `patient` (the slide's own name where it is absent), `split` (train, val, test) and `site`. Other columns are
kept and not looked at.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from wsi_trainer.errors import UserError
from wsi_trainer.io.display import clean
from wsi_trainer.io.frames import A_FRAME, is_frame, table_of
from wsi_trainer.io.tables import micrometres, read_table, write_table
from wsi_trainer.preprocess.stores import StoreIndex
from wsi_trainer.slide.identity import SlideId
from wsi_trainer.slide.names import SlideFolders, file_about, same_patient
from wsi_trainer.slide.slide import Slide

if TYPE_CHECKING:
    from pandas import DataFrame

log = logging.getLogger("wsi_trainer")

Split = Literal["train", "val", "test"]
SPLITS: tuple[str, ...] = get_args(Split)
PATHS = ("regions",)
"""Columns that name a file; its path is relative to where those of the slides are."""
NO_NAMES = frozenset({"nan", "na", "n/a", "<na>", "null", "none"})
"""What pandas, R and databases write into an empty cell; nobody is called so. Labels may be: they stay as written."""
FEATURES = ("{}.h5", "{}.pt")
"""Names of the file of features of a slide."""
_OWN = ("slide", "path", "label", "patient", "split", "site")


@dataclass(frozen=True)
class SlideRecord:
    """One line of the manifest."""

    slide: str
    """The slide's name as the manifest writes it, unique."""
    path: Path
    label: str
    patient: str
    split: str
    """train, val, test, or empty where the manifest leaves it to the trainer."""
    site: str = ""
    others: Mapping[str, str] = field(default_factory=dict)
    """The cells of all other columns."""
    marks: tuple[str, ...] = ()
    """The labels that apply, where several may: each is kept in proportion when slides are split."""
    parts: tuple[SlideRecord, ...] = ()
    """The slides of a patient, where the record is of one (`data.group`)."""
    finest: float | None = None
    """Micrometres per pixel to which a finer slide is shrunk: those of a run that is asked about other slides."""

    @property
    def cells(self) -> dict[str, str]:
        """The cells that a task may look at: the label and all other columns."""
        return {"label": self.label, **self.others}

    @property
    def mpp(self) -> float | None:
        """The number in the column `mpp`. `Slide.resolution` says how large pixels are."""
        return micrometres(self.others.get("mpp", ""), f"slide {self.slide}")

    def open(self) -> Slide:
        """The slide, open."""
        return Slide.open(self.path, mpp=self.mpp, name=self.slide)

    @property
    def called(self) -> tuple[str | Path, str | Path]:
        """Names after which files about the slide are called: its cell in the manifest, and its path."""
        return self.slide, self.path

    def identity(self, features: Path | None = None) -> SlideId:
        """The hashes by which the slide is known again.

        Args:
            features: The folder of the features that are read instead of the slide.
        """
        slide = SlideId.of(self.path)
        if features is None:
            return slide
        found = file_about(features, self.called, FEATURES)
        return slide.with_features(None if found is None else found[1])


def read_manifest(
    given: Path | DataFrame,
    root: Path | None = None,
    labelled: bool = True,
    columns: Sequence[str] = ("label",),
    filled: bool = True,
    stores: Path | None = None,
) -> list[SlideRecord]:
    """Read and check the manifest.

    Args:
        given: The CSV file, or a table with its columns.
        root: Where relative paths of slides start; by default the manifest's folder, of a table the current one.
        labelled: Whether each slide needs a label.
        columns: The columns with the label.
        filled: Whether none of these may be empty.
        stores: A folder that `preprocess` wrote, in which each slide is read from its store; None reads the slides.
    """
    needed = ("slide", *columns) if labelled else ("slide",)
    if is_frame(given):
        path, table = A_FRAME, table_of(given)
    elif not given.is_file():
        raise UserError(
            f"there is no manifest at {given}; it is a CSV file with the columns {' and '.join(('slide', *columns))}"
        )
    else:
        path, table = given, read_table(given)
    table.need(*needed)
    needed = needed if filled else ("slide",)
    base = path.parent if root is None else root
    folders = SlideFolders()
    records = [_record(path, line, row, base, needed, folders) for line, row in table.rows]
    if not records:
        raise UserError(f"{path} lists no slides; add one line for each")
    slide, count = Counter(record.slide for record in records).most_common(1)[0]
    if count > 1:
        raise UserError(f"{path} lists slide {slide} {count} times; each slide has one line")
    if stores is not None:
        records = from_stores(records, stores)
    _note_empty(path, sum(row.get("patient", "").strip().casefold() in NO_NAMES for _, row in table.rows))
    return _in_one_spelling(path, records)


def from_stores(records: Sequence[SlideRecord], folder: Path) -> list[SlideRecord]:
    """The records with the stores of their slides as paths.

    Raises:
        UserError: A slide has no store, or two slides have one.
    """
    index = StoreIndex(folder)
    found = [index.of(record.path) for record in records]
    missing = [record.slide for record, store in zip(records, found) if store is None]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(records)} slides have no store in {folder}, the first is {missing[0]}; convert "
            "them with `wsi-train preprocess`, or give their folder as data.stores (null reads the slides themselves)"
        )
    first: dict[Path | None, str] = {}
    for record, store in zip(records, found):
        if (other := first.setdefault(store, record.slide)) != record.slide:
            raise UserError(f"slides {other} and {record.slide} are one store, {store}; take one out of the manifest")
    return [replace(record, path=store) for record, store in zip(records, found) if store is not None]


def _in_one_spelling(path: Path, records: Sequence[SlideRecord]) -> list[SlideRecord]:
    """The records with each patient as it is first written. A slide that names none is a patient of its own."""
    first: dict[str, str] = {}
    for record in records:
        if record.patient != _own_patient(record.slide):
            first.setdefault(same_patient(record.patient), record.patient)
    patients = [first.get(same_patient(record.patient), record.patient) for record in records]
    others = {record.patient: patient for record, patient in zip(records, patients) if record.patient != patient}
    if others:
        _note_spellings(path, tuple(others.items()))
    return [replace(record, patient=patient) for record, patient in zip(records, patients)]


def _own_patient(slide: str) -> str:
    return Path(slide).name


@cache
def _note_spellings(path: Path, others: tuple[tuple[str, str], ...]) -> None:
    other, patient = others[0]
    log.warning(
        "%s writes %d patients in several ways, such as %s and %s: each is taken for one patient; write each in one "
        "way, and different patients by different names",
        clean(path), len({patient for _, patient in others}), clean(patient), clean(other),
    )  # fmt: skip


@cache
def _note_empty(path: Path, count: int) -> None:
    if count:
        log.warning(
            "%s has %d cells such as nan or NA in the column patient, which are read as empty: each of these slides "
            "counts as a patient of its own", clean(path), count,
        )  # fmt: skip


def write_manifest(path: Path, records: Sequence[SlideRecord]) -> None:
    """Write the records with absolute paths, so that the file means the same wherever it is copied to."""
    others = list(dict.fromkeys(column for record in records for column in record.others))
    rows = (
        [
            *(record.slide, record.path.resolve(), record.label, record.patient, record.split, record.site),
            *(record.others.get(column, "") for column in others),
        ]
        for record in records
    )
    write_table(path, ["slide", "path", "label", "patient", "split", "site", *others], rows, keep=True)


def check_files(records: Sequence[SlideRecord]) -> None:
    """Raise an error that names the first slide whose file is missing, or whose resolution is no number."""
    for record in records:
        _ = record.mpp
    missing = [record for record in records if not record.path.exists()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(records)} slides are missing, the first is {missing[0].path}; "
            "correct the column slide of the manifest, or give the folder of the slides"
        )


def _record(
    manifest: Path, line: int, row: Mapping[str, str], base: Path, needed: Sequence[str], folders: SlideFolders
) -> SlideRecord:
    values = {column: value.strip() for column, value in row.items()}
    _ = micrometres(values.get("mpp", ""), f"{manifest}, line {line}")
    for column in needed:
        if not values[column]:
            raise UserError(f"{manifest}, line {line}: the column {column!r} is empty")
    split = values.get("split", "")
    if split and split not in SPLITS:
        raise UserError(f"{manifest}, line {line}: split is {split!r}; it must be one of {', '.join(SPLITS)} or empty")
    for column in ("patient", "site"):
        if values.get(column, "").casefold() in NO_NAMES:
            values[column] = ""
    slide = values["slide"]
    return SlideRecord(
        slide=slide,
        path=folders.find(base / (values.get("path") or slide)),
        label=values.get("label", ""),
        patient=values.get("patient") or _own_patient(slide),
        split=split,
        site=values.get("site", ""),
        others={
            # A path is made absolute, so that it means the same wherever the manifest is copied to.
            column: str((base / value).resolve()) if value and column in PATHS else value
            for column, value in values.items()
            if column not in _OWN
        },
    )


def by_patient(records: Sequence[SlideRecord], columns: Sequence[str] = ()) -> list[SlideRecord]:
    """One record for each patient, under its name, with the slides as `parts`; patients in the order of their first.

    Args:
        records: The slides.
        columns: Those of the task, in which slides of one patient have to agree; empty where there are no labels.

    Raises:
        UserError: Slides of a patient have different labels, sites or splits.
    """
    slides: dict[str, list[SlideRecord]] = {}
    for record in records:
        slides.setdefault(record.patient, []).append(record)
    for own in slides.values():
        for other in own[1:]:
            _check(own[0], other, columns)
    return [replace(own[0], slide=patient, parts=tuple(own)) for patient, own in slides.items()]


def _check(first: SlideRecord, other: SlideRecord, columns: Sequence[str]) -> None:
    """Refuse what no prediction of a patient can be compared with."""
    cells = {column: (first.cells.get(column, ""), other.cells.get(column, "")) for column in columns}
    for name, (one, two) in {**cells, "site": (first.site, other.site), "split": (first.split, other.split)}.items():
        if one != two:
            raise UserError(
                f"patient {first.patient} has {one!r} as {name} of slide {first.slide} and {two!r} of {other.slide}; "
                "with data.group: patient all slides of a patient have one, so give them that, or leave out data.group"
            )
