"""The manifest of a public data set, from the table that its authors publish. Nothing is downloaded.

python datasets/manifest.py camelyon16 reference.csv manifest.csv --slides /data/camelyon16
python datasets/manifest.py tcga labels.csv manifest.csv
python datasets/manifest.py panda train.csv manifest.csv
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from wsi_trainer.errors import UserError
from wsi_trainer.io.display import clean
from wsi_trainer.io.tables import read_table, write_table

COLUMNS = ("slide", "label", "patient", "site", "split")
Row = Mapping[str, str]

# TCGA-<tissue source site>-<participant>-<sample and vial>-<portion>-<slide>.<uuid>
BARCODE = re.compile(r"(?P<patient>TCGA-(?P<source>[A-Z0-9]{2})-[A-Z0-9]{4})-\d{2}[A-Z]-\d{2}-[A-Z]{2}[A-Z0-9]*")


def camelyon16(row: Row) -> Row:
    """A line of `reference.csv`. No patients are published, so each slide is its own."""
    name = PurePath(row["image"]).stem
    if row["type"] not in ("normal", "tumor"):
        raise UserError(f"{row['image']}: type is {row['type']!r}; expected normal or tumor")
    split = "test" if name.startswith("test_") else ""
    return {"slide": name, "label": row["type"], "patient": name, "site": f"center_{row['center']}", "split": split}


def tcga(row: Row) -> Row:
    """A line of a table such as cBioPortal or the GDC give: a slide's name, and its subtype as the label.

    Patient and tissue source site are read from the barcode, and checked against columns with these names.
    """
    name = row["slide"].removesuffix(".svs")
    barcode = BARCODE.match(name)
    if barcode is None:
        raise UserError(f"{name} is no TCGA slide: expected a barcode such as TCGA-83-5908-01Z-00-DX1")
    stated = row.get("patient")
    if stated and stated != barcode["patient"]:
        raise UserError(f"{name}: the table says patient {stated}, the barcode {barcode['patient']}")
    site = row.get("site") or barcode["source"]
    return {"slide": name, "label": row["subtype"], "patient": barcode["patient"], "site": site, "split": ""}


def panda(row: Row) -> Row:
    """A line of `train.csv`: the label is the ISUP grade, the site the provider, and each biopsy its own patient."""
    name, grade = row["image_id"], row["isup_grade"]
    if grade not in {"0", "1", "2", "3", "4", "5"}:
        raise UserError(f"{name}: isup_grade is {grade!r}; expected 0 to 5")
    return {"slide": name, "label": grade, "patient": name, "site": row["data_provider"], "split": ""}


@dataclass(frozen=True)
class Recipe:
    """What a data set's table has, and what becomes of its lines."""

    columns: Sequence[str]
    translate: Callable[[Row], Row]
    """From a line of the table to a line of the manifest, its slide without folder or extension."""
    endings: Sequence[str]
    """Of the slides' files, the preferred one first."""


RECIPES = {
    "camelyon16": Recipe(("image", "type", "center"), camelyon16, (".tif", ".zarr")),
    "tcga": Recipe(("slide", "subtype"), tcga, (".svs", ".zarr")),
    "panda": Recipe(("image_id", "data_provider", "isup_grade"), panda, (".tiff", ".zarr")),
}


def translated(recipe: Recipe, path: Path) -> list[Row]:
    """The lines of the manifest."""
    if not path.is_file():
        raise UserError(f"there is no table at {path}")
    table = read_table(path)
    if missing := set(recipe.columns) - set(table.columns):
        has = ", ".join(table.columns) or "none"
        raise UserError(f"{path} has no column {sorted(missing)[0]}; its columns are {has}: is it the right table?")
    return [recipe.translate(row) for _, row in table.rows]


def find_slides(folder: Path, endings: Sequence[str]) -> dict[str, Path]:
    """The slides in a folder and those below it, by their names without the ending."""
    found: dict[str, Path] = {}
    for ending in endings:
        for path in sorted(folder.rglob(f"*{ending}")):
            name = path.name[: -len(ending)]
            if name in found and found[name].suffix == path.suffix:
                raise UserError(f"{name} is there twice: {found[name]} and {path}; remove one")
            found.setdefault(name, path)
    return found


def make_manifest(rows: Sequence[Row], manifest: Path, slides: Path | None, endings: Sequence[str]) -> list[str]:
    """Writes the manifest, and returns the names of the slides that are not there.

    Args:
        rows: Its lines, each slide without folder or ending.
        manifest: The file to write.
        slides: The folder of the slides: only those that are there are listed. None lists all as NAME + ending.
        endings: Endings of the slides' files, the preferred one first.
    """
    found = {row["slide"]: manifest.parent / f"{row['slide']}{endings[0]}" for row in rows}
    if slides is not None:
        found = find_slides(slides, endings)
    listed = [
        {**row, "slide": os.path.relpath(found[row["slide"]], manifest.parent)} for row in rows if row["slide"] in found
    ]
    missing = [row["slide"] for row in rows if row["slide"] not in found]
    if not listed:
        raise UserError(f"{slides}: none of the {len(missing)} slides of the table is there, such as {missing[0]}")
    write_table(manifest, COLUMNS, ([line[column] for column in COLUMNS] for line in listed), keep=True)
    print(f"{len(listed)} slides in {manifest}")
    return missing


def main() -> int:
    """DATA SET, TABLE and MANIFEST from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES, metavar="DATASET", help=", ".join(RECIPES))
    parser.add_argument("table", type=Path, help="the official label file")
    parser.add_argument("manifest", type=Path, help="the manifest to write")
    parser.add_argument("--slides", type=Path, help="folder of the slides; without it all are listed")
    options = parser.parse_args()
    recipe = RECIPES[options.recipe]
    try:
        rows = translated(recipe, options.table)
        missing = make_manifest(rows, options.manifest, options.slides, recipe.endings)
    except UserError as error:
        print(clean(error), file=sys.stderr)
        return error.exit_code
    if missing:
        print(clean(f"{len(missing)} slides of the table are not in {options.slides}, such as {missing[0]}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
