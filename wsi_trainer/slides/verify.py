"""`wsi-train verify`: everything that was converted, read again and compared with what was written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from wsi_trainer.errors import UserError
from wsi_trainer.stopping import ends_at_once
from wsi_trainer.terminal import say

from .bar import slide_bar
from .cohort import MANIFEST, read_manifest_of
from .convert import STAGING
from .export import FOLDER
from .store.manifest import Damage, find_damage


def find_stores(out: Path) -> list[Path]:
    """All stores in a folder: those that are there, and those that its manifest lists."""
    if out.suffix == ".zarr":
        return [out]
    there = set(_walk(out, set()))
    table = read_manifest_of(out)
    names = [] if table is None else [row["slide"].strip() for _, row in table.rows]
    outside = [name for name in names if name.startswith("/") or ".." in Path(name).parts]
    if outside:
        raise UserError(f"{out / MANIFEST} lists {outside[0]}, which is not in {out}; take that line out")
    there |= {out / name for name in names if name.endswith(".zarr")}  # other lines are the user's own
    return sorted(there)


def _walk(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    found = folder.stat()
    if (found.st_dev, found.st_ino) in seen:
        return  # a link led back to it
    seen.add((found.st_dev, found.st_ino))
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name not in (STAGING, FOLDER):
            if entry.suffix == ".zarr":
                yield entry
            else:
                yield from _walk(entry, seen)


def check_store(store: Path) -> list[Damage]:
    """What is wrong with one store."""
    if not store.is_dir():
        return [Damage(store, "", "the store is missing; the manifest of the folder lists it")]
    return list(find_damage(store))


def verify(out: Path, workers: int | None = None) -> int:
    """Read converted slides again and compare them with their manifests of hashes.

    Finds changed bits, deleted and truncated files and files that do not belong there, in every shard and in
    the metadata. A slide that is named can be repaired by removing its store and running preprocess again.

    Args:
        out: The folder that preprocess wrote, or one store.
        workers: Stores that are read at the same time; the default is one for each core.

    Returns:
        0 if all is well, 1 if something is damaged.
    """
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: expected 1 or more")
    if not out.is_dir():
        raise UserError(f"{out} is not a folder; give the one that preprocess wrote")
    stores = find_stores(out)
    if not stores:
        raise UserError(f"{out} holds no store (NAME.zarr); give the folder that preprocess wrote")
    console = Console()
    damages: list[Damage] = []
    sizes = [_size(store) for store in stores]
    with (
        ends_at_once(),
        slide_bar(console, "verifying", sizes) as bar,
        ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool,
    ):
        for number, found in enumerate(pool.map(check_store, stores)):
            bar.finished(number)
            damages += found
    for damage in damages:
        place = damage.store / damage.file if damage.file else damage.store
        say(console, f"{place}: {damage.reason}", lead="damaged", lead_style="red")
    broken = len({damage.store for damage in damages})
    say(console, f"{len(stores) - broken} of {len(stores)} stores are as they were written")
    return 1 if damages else 0


def _size(store: Path) -> int:
    return sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
