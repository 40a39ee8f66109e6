"""Stores that this package wrote: their chunks are decoded straight from their shards.

zarr-python with the codecs of zarrs decodes them at 70 % of this speed and tensorstore at 70 to 96 %; tensorstore also
ends a process that was forked, as workers of a DataLoader are, and reads a shard that is missing as white.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from wsi_trainer.errors import SlideError, UnsupportedSlide
from wsi_trainer.io.untrusted import read_json
from wsi_trainer.slide.formats.base import CHANNELS, PLAIN, Level, Pixels, Reader, ReadOptions, SlideInfo
from wsi_trainer.slide.geometry import is_painted, place_of_store
from wsi_trainer.store.chunks import CorruptChunk, Layout, StoredLevel, ZstdCodec, codec_of
from wsi_trainer.store.manifest import check_complete, shards_of
from wsi_trainer.store.ngff import image_array


def claims(path: Path, head: bytes) -> bool:
    """True if this folder is a store with the layout that this package writes."""
    return is_own_store(path)


def is_own_store(path: Path) -> bool:
    """True if a store has the layout that this package writes; an error where that cannot be read, since the slide
    would be taken for another one."""
    try:
        _own_level(path, 0)
    except (NotADirectoryError, IsADirectoryError, SlideError):
        return False
    except OSError as error:
        raise SlideError(path, f"cannot be read: {error.strerror or error}") from error
    return True


class StoreReader(Reader):
    """A store of this package. It holds no open file.

    Attributes:
        place: Transform of level 0 to the slide that the store was made from.
        painted: True where all that is no tissue was painted white.
    """

    planar = True

    def __init__(self, path: Path | str, options: ReadOptions = PLAIN) -> None:
        super().__init__(path, options)
        path = self._path
        if options != PLAIN:
            raise UnsupportedSlide(path, "a store holds one image of 8 bits; there is nothing to choose in it")
        files = check_complete(path)
        self._levels: list[StoredLevel] = []
        while not self._levels or (path / str(len(self._levels)) / "zarr.json").exists():
            shape, layout, codec = _own_level(path, len(self._levels))
            listed = frozenset() if files is None else shards_of(files, len(self._levels))
            self._levels.append(StoredLevel(path / str(len(self._levels)), shape, layout, codec, listed))
        self.block = self._levels[0].layout.chunk
        self.place, self.painted = place_of_store(path), is_painted(path)
        self.info = SlideInfo(
            levels=tuple(Level(*level.shape, float(2**depth)) for depth, level in enumerate(self._levels)),
            mpp=self.place.pixel(),
            reader="wsi-train",
            vendor="ome-zarr 0.5",
            details={"tile": f"{self.block}x{self.block}"},
        )

    def _part(self, level: int, top: int, left: int, bottom: int, right: int) -> Pixels:
        out = np.empty((bottom - top, right - left, CHANNELS), np.uint8)
        self.read_into(level, top, left, out.transpose(2, 0, 1))
        return out

    def read_into(self, level: int, y: int, x: int, out: Pixels) -> None:
        with self._blamed():
            self._levels[level].read_into(y, x, out)

    def empty(self, level: int, y: int, x: int, height: int, width: int) -> bool:
        with self._blamed():
            return self._levels[level].is_fill(y, x, height, width)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Names the store in what is raised inside."""
        try:
            yield
        except (CorruptChunk, OSError) as error:
            raise SlideError(self._path, f"damaged: {error}; convert the slide again") from error


def _own_level(path: Path, level: int) -> tuple[tuple[int, int], Layout, ZstdCodec]:
    """Height and width, layout and codec of a level."""
    try:
        found: dict[str, Any] = read_json(path / str(level) / "zarr.json")
        sharding = found["codecs"][0]["configuration"]
        layout = Layout(sharding["chunk_shape"][1], found["chunk_grid"]["configuration"]["chunk_shape"][1])
        codec = codec_of(sharding["codecs"])
        expected = image_array((found["shape"][1], found["shape"][2]), layout, codec)
    except FileNotFoundError as error:
        raise SlideError(path, f"has no level {level}") from error
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise SlideError(path, f"level {level} was not written by this package") from error
    if any(
        found.get(key) != expected[key] for key in ("shape", "codecs", "chunk_grid", "chunk_key_encoding", "fill_value")
    ):
        raise SlideError(path, f"level {level} was not written by this package")
    return (found["shape"][1], found["shape"][2]), layout, codec
