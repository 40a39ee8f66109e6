"""OME-Zarr 0.4 and 0.5 stores, also those that other software wrote."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from wsi_trainer.errors import UserError
from wsi_trainer.foreign.arrays import CODECS, codecs_of

from ..errors import SlideError
from ..store.complete import check_complete
from .closing import Closing
from .limits import check_decoded, check_size
from .ngff import Multiscale, image_group, multiscale
from .options import PLAIN, ReadOptions, check_bits, choose_channel, describe_channels
from .protocol import Level, Pixels, SlideInfo, blank, clip_box, level_downsample


def claims(path: Path, head: bytes) -> bool:
    """Whether this folder is a zarr group."""
    return path.is_dir() and any((path / name).is_file() for name in ("zarr.json", ".zgroup"))


class OmeZarrReader(Closing):
    """A multiscale image of a zarr store, read with zarr-python."""

    name = "omezarr"

    def __init__(self, path: Path | str, options: ReadOptions = PLAIN) -> None:
        import zarr  # takes a third of a second, which other slides need not wait for

        self._path, self._options = Path(path), options
        check_complete(self._path)
        try:
            group = image_group(self._path, zarr.open_group(self._path, mode="r"))
            found = multiscale(self._path, group)
            self._axes = found.axes
            self._arrays = [self._array(group, name) for name in found.paths]
        except (UserError, MemoryError):
            raise
        except zarr.errors.ContainsArrayError as error:
            raise SlideError(self._path, "a zarr array and not a group; OME-Zarr has its arrays in one") from error
        except Exception as error:  # zarr raises many kinds
            said = isinstance(error, ValueError | OSError | zarr.errors.BaseZarrError) and str(error)
            raise SlideError(self._path, f"broken zarr store: {said or 'its metadata cannot be read'}") from error
        shapes = [self._flat_shape(array) for array in self._arrays]
        if any(shape[0] > shapes[0][0] or shape[1] > shapes[0][1] for shape in shapes):
            raise SlideError(self._path, f"its levels have {shapes} px; expected the largest first")
        first = self._arrays[0]
        self._scale = check_bits(self._path, first.dtype, options)
        if any(array.dtype != first.dtype for array in self._arrays):
            raise SlideError(self._path, "its levels have different kinds of pixels")
        self._channel = self._chosen(first, found)
        changes = []
        if self._channel is not None:
            changes.append(f"channel {options.channel} of {self._sizes(first).get('c', 1)}")
        if self._scale is not None:
            changes.append(f"{first.dtype} {self._scale} to 8 bits")
        self.info = SlideInfo(
            levels=tuple(Level(h, w, level_downsample(shapes[0], h, w)) for h, w in shapes),
            mpp=found.mpp,
            reader=f"zarr {version('zarr')}",
            vendor=f"ome-zarr {found.version}",
            changes=tuple(changes),
            unreadable=found.unreadable,
        )

    def _array(self, group: Any, name: str) -> Any:
        if name not in group:
            raise SlideError(self._path, f"level {name!r} of the metadata is missing in the store")
        array = group[name]
        if not hasattr(array, "chunks"):
            raise SlideError(self._path, f"level {name!r} of the metadata is a group and not an array")
        unknown = codecs_of(array) - CODECS
        if unknown:
            raise SlideError(self._path, f"level {name!r} is stored with {sorted(unknown)[0]!r}, which is not run")
        check_decoded(self._path, f"a chunk of {array.chunks}", int(np.prod(array.chunks)) * array.dtype.itemsize)
        return array

    def _sizes(self, array: Any) -> dict[str, int]:
        if len(array.shape) != len(self._axes):
            raise SlideError(self._path, f"an array of {len(array.shape)} dimensions has the axes {list(self._axes)}")
        return dict(zip(self._axes, array.shape, strict=True))

    def _flat_shape(self, array: Any) -> tuple[int, int]:
        sizes = self._sizes(array)
        if any(size != 1 for axis, size in sizes.items() if axis not in "cyx"):
            raise SlideError(self._path, f"axes {sizes}: a stack; expected one flat image")
        check_size(self._path, sizes["y"], sizes["x"])
        return sizes["y"], sizes["x"]

    def _chosen(self, array: Any, found: Multiscale) -> int | None:
        """The only channel to read; None reads grey or RGB."""
        count, wanted = self._sizes(array).get("c", 1), self._options.channel
        if wanted is not None:
            return choose_channel(self._path, wanted, found.channels, count)
        if count not in (1, 3):
            names = describe_channels(found.channels, count)
            raise SlideError(self._path, f"{count} channels; choose one with preprocess --channel ({names})")
        return None

    def read(self, level: int, y: int, x: int, height: int, width: int) -> Pixels:
        out = blank(height, width, self.info.background)
        top, left, bottom, right = clip_box(y, x, height, width, self.info.levels[level])
        if bottom <= top or right <= left:
            return out
        channels = slice(None) if self._channel is None else slice(self._channel, self._channel + 1)
        cut: dict[str, slice | int] = {"y": slice(top, bottom), "x": slice(left, right), "c": channels}
        try:
            part = self._arrays[level][tuple(cut.get(axis, 0) for axis in self._axes)]
        except Exception as error:
            raise SlideError(self._path, f"level {level} cannot be decoded: {error}") from error
        if self._scale is not None:
            part = self._scale.apply(part)
        kept = [axis for axis in self._axes if axis in cut]
        if "c" in kept:
            part = np.moveaxis(part, [kept.index(axis) for axis in "yxc"], [0, 1, 2])
        else:
            part = (part if kept == ["y", "x"] else part.T)[..., None]
        out[top - y : bottom - y, left - x : right - x] = part
        return out

    def associated(self, name: str) -> Pixels:
        raise SlideError(self._path, f"no associated image {name!r}; stores of slides keep none")

    def close(self) -> None:
        """Nothing is held open."""

    def __reduce__(self) -> tuple[type[OmeZarrReader], tuple[Path, ReadOptions]]:
        return OmeZarrReader, (self._path, self._options)
