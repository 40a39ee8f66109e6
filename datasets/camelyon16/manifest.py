"""The manifest of CAMELYON16 from its `reference.csv` (image, type, class, center).

    python datasets/camelyon16/manifest.py reference.csv manifest.csv [--slides FOLDER]

The label is normal or tumor; slides named test_* are the official test set. No patients are published, so each
slide is its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import PurePath

from wsi_trainer.errors import UserError
from wsi_trainer.slides.recipes import run


def translate(row: Mapping[str, str]) -> Mapping[str, str]:
    """One line of the manifest."""
    name = PurePath(row["image"]).stem
    if row["type"] not in ("normal", "tumor"):
        raise UserError(f"{row['image']}: type is {row['type']!r}; expected normal or tumor")
    split = "test" if name.startswith("test_") else ""
    return {"slide": name, "label": row["type"], "patient": name, "site": f"center_{row['center']}", "split": split}


if __name__ == "__main__":
    sys.exit(run(__doc__, ("image", "type", "center"), translate, (".tif", ".zarr")))
