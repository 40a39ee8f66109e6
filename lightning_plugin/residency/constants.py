"""Where a stored map is known to be constant; see [Note: identical tiles] in `execute.alike`."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from lightning_plugin.boxes import Box


class Constants:
    """Where a stored map is known to be constant: the tiles that were written with one value."""

    def __init__(self) -> None:
        self.keys: dict[tuple[int, ...], bytes | None] = {}
        self._any = False
        self._edges: list[list[int]] | None = None
        self._cells: np.ndarray | None = None

    def note(self, box: Box, key: bytes | None) -> None:
        """A tile was written; ``key`` stands for its value if it has but one."""
        self.keys[box.lo] = key
        self._any |= key is not None
        self._cells = None

    def at(self, box: Box) -> bytes | None:
        """The key of the value on a box, where all of it is known to be the same."""
        if not self._any:
            return None
        cells, edges, names = self.table()
        picks = []
        for a, (lo, hi) in enumerate(box.intervals()):
            picks.append(slice(max(0, bisect_right(edges[a], lo) - 1), bisect_right(edges[a], hi - 1)))
        found = np.unique(cells[tuple(picks)])
        return names[int(found[0])] if len(found) == 1 else None

    def table(self) -> tuple[np.ndarray, list[list[int]], list[bytes | None]]:
        """The tiles as an array of numbers, where each begins, and the keys that the numbers stand for."""
        if self._cells is None or self._edges is None:
            axes = len(next(iter(self.keys)))
            self._edges = [sorted({lo[a] for lo in self.keys}) for a in range(axes)]
            self._names: list[bytes | None] = [None, *dict.fromkeys(k for k in self.keys.values() if k is not None)]
            number = {key: i for i, key in enumerate(self._names)}
            places = [{lo: i for i, lo in enumerate(edges)} for edges in self._edges]
            self._cells = np.zeros([len(e) for e in self._edges], dtype=np.int64)
            for lo, key in self.keys.items():
                self._cells[tuple(p[x] for p, x in zip(places, lo, strict=True))] = number[key]
        return self._cells, self._edges, self._names
