"""The manifest of PANDA from its `train.csv` (image_id, data_provider, isup_grade, gleason_score).

    python datasets/panda/manifest.py train.csv manifest.csv [--slides FOLDER]

The label is the ISUP grade, 0 to 5; the site is the provider. No patients are published, so each biopsy is its
own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from wsi_trainer.errors import UserError
from wsi_trainer.slides.recipes import run


def translate(row: Mapping[str, str]) -> Mapping[str, str]:
    """One line of the manifest."""
    name, grade = row["image_id"], row["isup_grade"]
    if grade not in {"0", "1", "2", "3", "4", "5"}:
        raise UserError(f"{name}: isup_grade is {grade!r}; expected 0 to 5")
    return {"slide": name, "label": grade, "patient": name, "site": row["data_provider"], "split": ""}


if __name__ == "__main__":
    sys.exit(run(__doc__, ("image_id", "data_provider", "isup_grade"), translate, (".tiff", ".zarr")))
