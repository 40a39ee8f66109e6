"""Features under way: rows appended to a file, from which work goes on after it was killed."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from itertools import repeat, takewhile
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.errors import UserError
from wsi_trainer.foreign import read_text


class PartialRows:
    """The rows of one slide that are done, in two files beside the one to be: rows, and what they are rows of, with a
    checksum of each batch.

    Rows that were made of something else, another encoder or other patches, are thrown away, and so is what is not what
    was written. A batch that was cut short is made again, so that all batches are those of work that was never stopped.
    """

    def __init__(self, target: Path, width: int, batch: int, identity: Mapping[str, Any]) -> None:
        """Open what is there.

        Args:
            target: The file to be.
            width: Numbers in a row.
            batch: Rows that are made at a time.
            identity: What rows depend on.
        """
        self.rows, self.about = beside(target)
        self.width, said = width, json.dumps({**identity, "width": width, "batch": batch}, sort_keys=True)
        lines = _lines(self.about)
        sums = lines[1:] if lines[:1] == [said] else []
        self._file: BinaryIO = self.rows.open("r+b" if self.rows.is_file() else "w+b")
        sums = [total for total, _ in zip(sums, takewhile(bool, map(self._is, sums, repeat(4 * width * batch))))]
        self.done = len(sums) * batch
        self._file.truncate(4 * width * self.done)
        self._file.seek(0, os.SEEK_END)
        self._about: TextIO = self.about.open("w", encoding="utf-8")
        self._about.write("".join(f"{line}\n" for line in (said, *sums)))
        self._about.flush()

    def _is(self, total: str, size: int) -> bool:
        """Whether the next bytes are those of which this is the checksum."""
        content = self._file.read(size)
        return len(content) == size and total == _sum(content)

    def append(self, rows: NDArray[np.float32]) -> None:
        """Write the rows of a batch."""
        if not np.isfinite(rows).all():
            raise UserError(
                f"{self.rows.parent}: the encoder makes numbers that are not finite; set train.precision: 32-true"
            )
        content = np.ascontiguousarray(rows, np.float32).tobytes()
        self._file.write(content)
        self._file.flush()
        self._about.write(f"{_sum(content)}\n")
        self._about.flush()
        self.done += len(rows)

    def memory(self) -> NDArray[np.float32]:
        """All rows, mapped and not read."""
        return np.memmap(self.rows, np.float32, "r", shape=(self.done, self.width))

    def close(self) -> None:
        """Let both files go."""
        self._file.close()
        self._about.close()

    def remove(self) -> None:
        """What is done leaves nothing behind."""
        self.close()
        remove((self.rows, self.about))


def beside(target: Path) -> tuple[Path, Path]:
    """The two files beside the one to be."""
    return target.with_name(f".{target.name}.rows"), target.with_name(f".{target.name}.json")


def remove(files: Iterable[Path]) -> None:
    """Remove what is there of some files."""
    for file in files:
        file.unlink(missing_ok=True)


def _lines(path: Path) -> list[str]:
    """The lines of a text, none where it is damaged."""
    try:
        return read_text(path).splitlines() if path.is_file() else []
    except UserError:
        return []


def _sum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"
