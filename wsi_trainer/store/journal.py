"""Journal of finished shards, with which a conversion continues after any interruption.

One line of JSON for each finished shard, written after the shard itself is safe on disk. The first line
says of which source and with which settings; a journal of others is of no use.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from wsi_trainer.foreign import json_of, read_text
from wsi_trainer.io.files import replace_file


@dataclass(frozen=True)
class Entry:
    """One finished shard: its file's size and hash, or neither where the shard is absent."""

    key: str
    size: int = 0
    sha256: str | None = None


class Journal:
    """The journal of one store under construction. Use as a context manager."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._path = path
        self._header = json.loads(json.dumps(header))
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self.entries: dict[str, Entry] = {}
        self.matches = self._load()

    def _load(self) -> bool:
        """Reads what is there; False if there is nothing that fits the header."""
        try:
            lines = read_text(self._path).splitlines(keepends=True)
        except FileNotFoundError:
            return False
        # A line that was being written when the process died has no end.
        complete = [line for line in lines if line.endswith("\n")]
        try:
            records = [json_of(line, self._path) for line in complete]
        except ValueError:
            return False
        if not records or records[0] != self._header:
            return False
        self.entries = {record["key"]: Entry(**record) for record in records[1:]}
        return True

    def __enter__(self) -> Journal:
        """Opens the journal for writing; begins a new one unless the old one fits."""
        # Rewritten whole: an unfinished last line would spoil the next one.
        lines = [self._header, *map(asdict, self.entries.values())]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        # Who writes it has the lock of its store, so the partial file may always have the same name.
        replace_file(self._path, text.encode(), partial=self._path.with_name(f"{self._path.name}.part"))
        self._file = self._path.open("a")
        return self

    def add(self, entry: Entry) -> None:
        """Notes a finished shard. Safe to call from several threads."""
        assert self._file is not None, "a context manager"
        with self._lock:
            self.entries[entry.key] = entry
            self._file.write(json.dumps(asdict(entry)) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
