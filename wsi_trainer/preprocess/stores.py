"""The stores of a folder: found on disk, listed in stores.csv, and looked up by the names of their slides."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.files import LOCKS, Locked, lock, replace_file
from wsi_trainer.io.tables import escape_formula, read_table, table_bytes, unescape_formula
from wsi_trainer.preprocess.inputs import list_slides
from wsi_trainer.slide.formats.store import is_own_store
from wsi_trainer.slide.identity import KnownSlides, SlideId
from wsi_trainer.slide.names import letters, without_ending
from wsi_trainer.store.convert import NGFF04, STAGING, Converted, Job, stored

STORES = "stores.csv"
TEMPLATE = "manifest.csv"
TABLES = f"{LOCKS}/tables.lock"
PATIENCE = 600.0
"""Seconds to wait for the tables: a job that lists ten thousand stores reads the manifest of each."""
_COLUMNS = ("slide", "store", *(f.name for f in fields(Converted) if f.name not in ("name", "store", "skipped")))


def find_stores(folder: Path) -> dict[str, Path]:
    """All stores in a folder and those below it by the names of their slides; each folder is searched once."""
    found = sorted(_walk(folder, set()))
    return {path.relative_to(folder).as_posix().removesuffix(".zarr"): path for path in found}


def _walk(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    there = folder.stat()
    if (there.st_dev, there.st_ino) in seen:
        return  # a link led back to it
    seen.add((there.st_dev, there.st_ino))
    for entry in os.scandir(folder):
        if entry.is_dir() and entry.name not in (STAGING, NGFF04):
            path = folder / entry.name
            if path.suffix == ".zarr":
                yield path
            else:
                yield from _walk(path, seen)


@dataclass(frozen=True)
class Listing:
    """The stores of a folder after a run."""

    stores: tuple[Converted, ...]
    gone: tuple[str, ...]
    """Slides that stores.csv listed before and whose stores are no longer there."""

    @property
    def twins(self) -> list[list[str]]:
        """The names of stores that were made from one and the same file."""
        names: dict[str, list[str]] = {}
        for row in self.stores:
            names.setdefault(row.source or row.name, []).append(row.name)
        return [same for same in names.values() if len(same) > 1]


def write_stores(out: Path) -> Listing:
    """Lists all stores of a folder in its stores.csv.

    The table is made of what is on disk: whatever other runs do, and wherever one dies, the next run corrects it.
    """
    with _tables(out):
        before = listed_in(out)
        found = find_stores(out)
        rows = tuple(row for name in found if (row := stored(Job(Path(), name), out)) is not None)
        write_file(out / STORES, table_bytes(_COLUMNS, map(_cells, rows)))
    return Listing(rows, tuple(name for name in before if name not in found))


@contextmanager
def _tables(out: Path) -> Iterator[None]:
    """Keep the other jobs of an array, which end at the same time, from the tables of a folder; they take turns."""
    try:
        with lock(out / TABLES, PATIENCE):
            yield
    except Locked as error:
        raise UserError(
            f"{out / STORES}: another run is writing it; what is converted is safe, give the same command again"
        ) from error


def listed_in(out: Path) -> list[str]:
    """The names of the slides that stores.csv lists; an error where somebody else wrote that file."""
    path = out / STORES
    if not path.is_file():
        return []
    table = read_table(path)
    if table.columns and not {"slide", "store"} <= set(table.columns):
        raise UserError(f"{path} is not a table of preprocess, which would replace it; give another folder")
    return [unescape_formula(cells["slide"]) for _, cells in table.rows]


def _cells(row: Converted) -> dict[str, object]:
    cells = {"slide": row.name, **asdict(row)}
    cells["rules"] = "; ".join(f"{name} {share:.2%}" for name, share in row.rules.items())
    return {name: escape_formula(value) for name, value in cells.items()}


def unlisted(out: Path, names: Sequence[str], template: bool) -> list[str]:
    """The slides that OUT/manifest.csv lacks. It is the user's and never changed.

    Args:
        out: The folder of the stores.
        names: The slides of this run.
        template: Write one with a line for each of these where there is none, for the user to complete.
    """
    path = out / TEMPLATE
    with _tables(out):
        if template and not path.exists():
            rows = [{"slide": f"{name}.zarr"} for name in names]
            write_file(path, table_bytes(("slide", "label", "patient"), rows))
    if not path.is_file():
        return []
    try:
        cells = [letters(posixpath.normpath(row.get("slide", "").strip())) for _, row in read_table(path).rows]
    except UserError:  # `fit` says what is wrong with it
        return []
    known = {name for cell in cells for name in (cell, without_ending(cell))}
    return [name for name in names if letters(name) not in known]


def write_file(path: Path, data: bytes) -> None:
    """Writes a table at the end of a run."""
    try:
        replace_file(path, data)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}; what is converted is safe, give the same command again"
        ) from error


class StoreIndex:
    """Finds the store of a slide by its name.

    Names of stores are those of slides without the ending, with as many folders as it takes to tell them apart. So
    the longest end of a slide's path that is the name of a store is its name; a slide of which only the file's name is
    known has the one store of that name.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"data.stores is {folder}; there is no such folder")
        self.folder = folder
        self.stores: Mapping[str, Path] = {letters(name): path for name, path in find_stores(folder).items()}
        self._last: dict[str, list[str]] = {}
        for name in self.stores:
            self._last.setdefault(posixpath.basename(name), []).append(name)

    def of(self, slide: Path) -> Path | None:
        """The store of a slide, or None where there is none; an error where there are several."""
        parts = [letters(part) for part in slide.parts]
        for start in range(len(parts)):
            whole = "/".join(parts[start:])
            for name in (whole, without_ending(whole)):
                if name in self.stores:
                    return self.stores[name]
        names = self._last.get(parts[-1]) or self._last.get(without_ending(parts[-1])) or []
        if len(names) > 1:
            raise UserError(
                f"slide {slide} may be {' or '.join(names[:3])} in {self.folder}; write its folder into the manifest"
            )
        return self.stores[names[0]] if names else None


class Originals:
    """Slides of a folder, found by their hashes under any name."""

    def __init__(self, folder: Path | None = None) -> None:
        self._known = KnownSlides()
        if folder is not None and not folder.is_dir():
            raise UserError(f"--originals {folder}: there is no such folder")
        for item in () if folder is None else list_slides(str(folder)):
            self._known.add(str(item.job.slide), SlideId.of(item.job.slide))

    def of(self, path: Path) -> Path | None:
        """The original of a slide: itself, or for a store the slide it was made from, where that is known."""
        if not is_own_store(path):
            return path
        try:
            found = self._known.find(SlideId.of(path))
        except SlideError:  # a store that lost its manifest is read all the same
            return None
        return None if found is None else Path(found)
