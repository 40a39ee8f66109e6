"""The folder of the demo: made once, recognised again, and never somebody else's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from wsi_trainer.errors import UserError
from wsi_trainer.fit.run import read_json
from wsi_trainer.io.files import write_json

_MARK = "demo.json"


def prepare(out: Path, made_from: dict[str, Any]) -> bool:
    """Make the folder ready and say whether slides of an earlier demo with these settings are in it.

    An earlier demo's runs are removed; a folder with anything else in it is refused.
    """
    mark = out / _MARK
    if out.exists() and any(out.iterdir()) and not mark.is_file():
        raise UserError(f"{out} is not empty and not an earlier demo; choose another folder with --out")
    same = read_json(mark) == made_from
    for name in ("runs",) if same else ("runs", "slides", "zarr"):
        shutil.rmtree(out / name, ignore_errors=True)
    write_json(mark, made_from)
    return same and (out / "slides" / "manifest.csv").is_file()
