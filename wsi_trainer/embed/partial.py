"""Features under way: rows appended to a file, from which work goes on after it was killed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.errors import UserError
from wsi_trainer.foreign import read_text


class PartialRows:
    """The rows of one slide that are done, in two files beside the one to be: rows, and what they are rows of.

    Rows that were made of something else, another encoder or other patches, are thrown away. A batch that was cut
    short is made again, so that all batches are those of work that was never stopped.
    """

    def __init__(self, target: Path, width: int, batch: int, identity: Mapping[str, Any]) -> None:
        """Open what is there.

        Args:
            target: The file to be.
            width: Numbers in a row.
            batch: Rows that are made at a time.
            identity: What rows depend on.
        """
        self.rows = target.with_name(f".{target.name}.rows")
        self.about = target.with_name(f".{target.name}.json")
        self.width, said = width, json.dumps({**identity, "width": width, "batch": batch}, sort_keys=True)
        if not self.about.is_file() or read_text(self.about) != said:
            self.rows.unlink(missing_ok=True)
            self.about.write_text(said, encoding="utf-8")
        size = 4 * width
        held = self.rows.stat().st_size // size if self.rows.is_file() else 0
        self.done = held // batch * batch
        self._file: BinaryIO = self.rows.open("r+b" if self.rows.is_file() else "w+b")
        self._file.truncate(self.done * size)
        self._file.seek(0, os.SEEK_END)

    def append(self, rows: NDArray[np.float32]) -> None:
        """Write the rows of a batch."""
        if not np.isfinite(rows).all():
            raise UserError(
                f"{self.rows.parent}: the encoder makes numbers that are not finite; set train.precision: 32-true"
            )
        self._file.write(np.ascontiguousarray(rows, np.float32).tobytes())
        self._file.flush()
        self.done += len(rows)

    def memory(self) -> NDArray[np.float32]:
        """All rows, mapped and not read."""
        return np.memmap(self.rows, np.float32, "r", shape=(self.done, self.width))

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """What is done leaves nothing behind."""
        self.close()
        self.rows.unlink(missing_ok=True)
        self.about.unlink(missing_ok=True)
