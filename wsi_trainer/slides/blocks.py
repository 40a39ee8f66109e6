"""Where a `SlideSource` gets its pixels: square blocks of a store, or of a slide in its original file."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.foreign import read_json
from wsi_trainer.places import Place
from wsi_trainer.places.stored import place_of_store

from .errors import SlideError
from .order import Order, room
from .readers import open_reader
from .resample import ScaledImage
from .resolution import resolve, shrink_factor
from .store.codec import CorruptChunk, ZstdCodec, codec_of
from .store.complete import check_complete, shards_of
from .store.layout import CHANNELS, FILL, Layout
from .store.level import StoredLevel
from .store.metadata import image_array
from .tissue import TissueMask

Block = NDArray[np.uint8]
"""Pixels as channel, y, x."""


class Blocks(Protocol):
    """An image in square blocks. The last ones of a row or a column may be larger than what is left."""

    shape: tuple[int, int]
    size: int
    mpp: tuple[float, float] | None
    order: Order

    @property
    def place(self) -> Place:
        """Where the image lies in the slide that it was made from."""
        ...

    def load(self, row: int, column: int) -> Block | None:
        """The pixels of a block, or None if all of them are the fill value."""
        ...

    def paste(self, row: int, column: int, out: Block, y: int, x: int) -> None:
        """Decodes a block that lies in the box whose corner is (y, x), straight to its place there."""
        ...

    def is_fill(self, y: int, x: int, height: int, width: int) -> bool:
        """Whether a box inside the image is known, without reading, to hold the fill value only."""
        ...


class StoredBlocks:
    """The chunks of a level of a store that this package wrote."""

    order: Order = "planes"

    def __init__(self, path: Path, level: int = 0) -> None:
        metadata, layout, codec = _own_level(path, level)
        shape = (metadata["shape"][1], metadata["shape"][2])
        files = check_complete(path)
        listed = frozenset() if files is None else shards_of(files, level)
        self._level = StoredLevel(path / str(level), shape, layout, codec, listed)
        self._path = path
        self.shape, self.size = self._level.shape, layout.chunk
        self.mpp: tuple[float, float] | None = stored_mpp(path, level)
        self._depth = level

    @cached_property
    def place(self) -> Place:
        """Read when it is asked for: training needs none."""
        return place_of_store(self._path).coarser(2**self._depth)

    def load(self, row: int, column: int) -> Block | None:
        with self._blamed():
            return self._level.chunk(row, column)

    def paste(self, row: int, column: int, out: Block, y: int, x: int) -> None:
        with self._blamed():
            self._level.paste(row, column, out, y, x)

    def is_fill(self, y: int, x: int, height: int, width: int) -> bool:
        with self._blamed():
            return self._level.is_fill(y, x, height, width)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Names the store in what is raised inside."""
        try:
            yield
        except (CorruptChunk, OSError) as error:
            raise SlideError(self._path, f"damaged: {error}; convert the slide again") from error


def is_own_store(path: Path) -> bool:
    """Whether a store has the layout that this package writes, so that it can be read the fast way. Where that cannot
    be read it is not said that it has not: the slide would be taken for another one."""
    try:
        _own_level(path, 0)
    except (NotADirectoryError, IsADirectoryError, SlideError):
        return False
    except OSError as error:
        raise SlideError(path, f"cannot be read: {error.strerror or error}") from error
    return True


def _own_level(path: Path, level: int) -> tuple[dict[str, list[int]], Layout, ZstdCodec]:
    file = path / str(level) / "zarr.json"
    try:
        found = read_json(file)
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
    return found, layout, codec


def stored_mpp(path: Path, level: int) -> tuple[float, float]:
    """Micrometres per pixel of a level of a store."""
    try:
        attributes = read_json(path / "zarr.json")["attributes"]["ome"]
        scale = attributes["multiscales"][0]["datasets"][level]["coordinateTransformations"][0]["scale"]
        return float(scale[1]), float(scale[2])
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise SlideError(path, "damaged: zarr.json does not say how large a pixel is; copy the store again") from error


class SlideBlocks:
    """Blocks of a slide in its original file, at its own or at a coarser resolution.

    With a tissue mask all that is not tissue is the fill value, as `preprocess --background constant` does.
    """

    order: Order = "pixels"

    def __init__(
        self,
        path: Path,
        level: int = 0,
        mpp: float | None = None,
        source_mpp: float | None = None,
        mask: TissueMask | None = None,
        size: int = 512,
    ) -> None:
        self._reader = open_reader(path)
        weakref.finalize(self, self._reader.close)  # whoever lets go of the image closes its file
        levels, self.mpp = self._reader.info.levels, self._reader.info.mpp
        if not 0 <= level < len(levels):
            raise SlideError(path, f"has no level {level}; it has 0 to {len(levels) - 1}")
        factor = levels[level].downsample
        if self.mpp is not None:
            self.mpp = (self.mpp[0] * factor, self.mpp[1] * factor)
        if mpp is not None:
            own = resolve(path, self._reader.info, source_mpp)
            factor = shrink_factor(path, own, mpp)
            self.mpp = (own.y * factor, own.x * factor)
        self._image = ScaledImage(self._reader, factor)
        info = self._reader.info
        pixel = (source_mpp, source_mpp) if source_mpp is not None else info.mpp
        self.place = Place(info.shape, scale=self._image.scale, mpp=pixel, bounds=info.bounds)
        self._mask = mask
        self.shape, self.size = self._image.shape, size

    def load(self, row: int, column: int) -> Block | None:
        y, x = row * self.size, column * self.size
        height, width = min(self.size, self.shape[0] - y), min(self.size, self.shape[1] - x)
        if self.is_fill(y, x, height, width):
            return None
        block = room(self.order, CHANNELS, height, width)
        self._read(y, x, block)
        return block

    def paste(self, row: int, column: int, out: Block, y: int, x: int) -> None:
        top, left = row * self.size, column * self.size
        height, width = min(self.size, self.shape[0] - top), min(self.size, self.shape[1] - left)
        part = out[:, top - y : top - y + height, left - x : left - x + width]
        if self.is_fill(top, left, height, width):
            part[...] = FILL
        else:
            self._read(top, left, part)

    def _read(self, y: int, x: int, out: Block) -> None:
        """Fills an array with the pixels whose corner is (y, x)."""
        self._image.read_planes(y, x, out)
        if self._mask is not None:
            out[:, ~self._mask.cover(y, x, *out.shape[1:])] = FILL

    def is_fill(self, y: int, x: int, height: int, width: int) -> bool:
        return self._mask is not None and not self._mask.any_in(y, x, height, width)
