"""`wsi-train verify`: everything that was converted, read again and compared with what was written."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from wsi_trainer.errors import UserError
from wsi_trainer.io.display import say
from wsi_trainer.signals import ends_at_once
from wsi_trainer.store.manifest import Damage, find_damage

from .results import slide_bar
from .stores import STORES, find_stores, listed_in


def stores_of(out: Path) -> list[Path]:
    """All stores in a folder: those that are there, and those that stores.csv lists."""
    if out.suffix == ".zarr":
        return [out]
    listed = listed_in(out)
    outside = [name for name in listed if name.startswith("/") or ".." in Path(name).parts]
    if outside:
        raise UserError(f"{out / STORES} lists {outside[0]}, which is not in {out}; remove that file")
    return sorted({*find_stores(out).values(), *(out / f"{name}.zarr" for name in listed)})


def check_store(store: Path) -> list[Damage]:
    """Damages of one store."""
    if not store.is_dir():
        return [Damage(store, "", f"the store is missing; {STORES} lists it")]
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
    stores = stores_of(out)
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
