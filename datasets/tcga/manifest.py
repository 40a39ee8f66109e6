"""A manifest of TCGA slides from a table with the columns slide and a label.

    python datasets/tcga/manifest.py labels.csv manifest.csv [--slides FOLDER]

The table is one such as cBioPortal or the GDC give: slide (its name without .svs), and subtype (the label); the
patient and the tissue source site are read from the slide's barcode, and checked against the columns patient
and site where the table has them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from wsi_trainer.errors import UserError
from wsi_trainer.slides.recipes import run

# TCGA-<tissue source site>-<participant>-<sample and vial>-<portion>-<slide>.<uuid>
BARCODE = re.compile(r"(?P<patient>TCGA-(?P<source>[A-Z0-9]{2})-[A-Z0-9]{4})-\d{2}[A-Z]-\d{2}-[A-Z]{2}[A-Z0-9]*")


def translate(row: Mapping[str, str]) -> Mapping[str, str]:
    """One line of the manifest."""
    name = row["slide"].removesuffix(".svs")
    barcode = BARCODE.match(name)
    if barcode is None:
        raise UserError(f"{name} is no TCGA slide: expected a barcode such as TCGA-83-5908-01Z-00-DX1")
    stated = row.get("patient")
    if stated and stated != barcode["patient"]:
        raise UserError(f"{name}: the table says patient {stated}, the barcode {barcode['patient']}")
    site = row.get("site") or barcode["source"]
    return {"slide": name, "label": row["subtype"], "patient": barcode["patient"], "site": site, "split": ""}


if __name__ == "__main__":
    sys.exit(run(__doc__, ("slide", "subtype"), translate, (".svs", ".zarr")))
