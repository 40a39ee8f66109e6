"""Arrays of others: NumPy's without objects, zarr with codecs that only decode, HDF5 without links to other files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.errors import UserError

from .untrusted import Unreadable, open_file, too_much, what_is

# What may stand in a store's metadata as codec or filter. Any other that is installed would be run, and `pickle` runs
# whatever the file says.
CODECS = {
    "bytes", "transpose", "sharding_indexed", "blosc", "zlib", "gzip", "bz2", "lzma", "lz4", "zstd", "shuffle", "delta",
    "packbits", "bitround", "crc32", "crc32c", "adler32", "fletcher32", "fixedscaleoffset", "quantize", "astype",
}  # fmt: skip
_FLETCHER32 = 3
"""The number of HDF5's filter that keeps a checksum with each chunk."""


def load_array(path: Path) -> NDArray[Any]:
    """An array of a `.npy` file, left in its file until it is looked at.

    Raises:
        Unreadable: It is none, is cut short, or holds objects, which would be code.
        OSError: The system refuses.
    """
    try:
        with open_file(path) as file:
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0), (3, 0)):
                raise ValueError(f"version {version} is not known")
        found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except UserError:
        raise
    except OSError as error:
        if error.filename:
            raise
        raise Unreadable(path, f"is no array, or a damaged one: {error}") from error
    except Exception as error:  # a header is read as Python's literals are: whatever these raise
        raise Unreadable(path, f"is no array, or a damaged one: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(found, np.ndarray):
        raise Unreadable(path, "holds several arrays; expected one")
    return found


@cache
def _store() -> Any:
    """The kind of store of a folder whose files are files: what zarr reads whole may be a link to anything."""
    from zarr.storage import LocalStore  # takes a third of a second, which commands without zarr need not wait for

    class Files(LocalStore):
        def check(self, key: str, whole: bool) -> None:
            path = self.root / key
            if kind := what_is(path):
                raise Unreadable(path, f"is {kind} and not a file")
            if whole and path.is_file() and (reason := too_much("it", path.stat().st_size)):
                raise Unreadable(path, reason)

        async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
            self.check(key, byte_range is None)
            return await super().get(key, prototype, byte_range)

        def get_sync(self, key: str, **how: Any) -> Any:
            self.check(key, how.get("byte_range") is None)
            return super().get_sync(key, **how)

        async def get_partial_values(self, prototype: Any, key_ranges: Any) -> Any:
            ranges = list(key_ranges)
            for key, byte_range in ranges:
                self.check(key, byte_range is None)
            return await super().get_partial_values(prototype, ranges)

    return Files


def zarr_store(path: Path) -> Any:
    """The files of a zarr store, to be read: pipes, devices and files that are too large are refused."""
    return _store()(path, read_only=True)


def open_zarr(path: Path) -> Any:
    """A zarr group or array of which nothing is read yet. Arrays within are to be checked by `checked_array`."""
    import zarr

    try:
        return zarr.open(zarr_store(path), mode="r")
    except (UserError, MemoryError):
        raise
    except Exception as error:  # zarr raises many kinds on metadata that are damaged
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unreadable(path, f"broken zarr store: {reason}") from error


def checked_array(path: Path, array: Any, what: str = "it") -> Any:
    """A zarr array whose codecs only decode.

    Raises:
        Unreadable: It is none, or is stored with something that would be run.
    """
    if not hasattr(array, "chunks"):
        raise Unreadable(path, f"{what} is a group and not an array")
    if unknown := codecs_of(array) - CODECS:
        raise Unreadable(path, f"{what} is stored with {sorted(unknown)[0]!r}, which is not run")
    if 0 in array.chunks and 0 not in array.shape:
        raise Unreadable(path, f"{what} is stored in chunks of {array.chunks}, which hold nothing")
    return array


def member(path: Path, group: Any, name: Any) -> Any:
    """The array of this name in a group, checked; a name that leads out of the store is refused."""
    if not isinstance(name, str) or not name or name.startswith("/") or ".." in name.split("/"):
        raise Unreadable(path, f"names an array {name!r}; expected a name inside the store")
    try:
        found = group[name]
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise Unreadable(path, f"has no array {name!r} that can be read ({type(error).__name__})") from error
    return checked_array(path, found, name)


def open_zarr_array(path: Path) -> Any:
    """A zarr array by itself, checked."""
    return checked_array(path, open_zarr(path))


def codecs_of(array: Any) -> set[str]:
    """The names of all codecs and filters of an array, those inside shards too."""
    stored = array.metadata.to_dict()
    found = [*(stored.get("codecs") or []), *(stored.get("filters") or []), stored.get("compressor")]
    names: set[str] = set()
    while found:
        codec = found.pop()
        if hasattr(codec, "get_config"):  # of numcodecs
            codec = codec.get_config()
        if isinstance(codec, dict):
            name = str(codec.get("name") or codec.get("id"))
            names.add(name.removeprefix("numcodecs."))
            inner = codec.get("configuration") or {}
            found += [*inner.get("codecs", []), *inner.get("index_codecs", [])]
        elif codec is not None:
            names.add(type(codec).__name__)
    return names


def import_h5py(path: Path) -> Any:
    """The package, or an error that says how to get it."""
    try:
        import h5py
    except ImportError as error:
        raise UserError(f"{path} is HDF5, and h5py is not installed: pip install 'wsi-trainer[hdf5]'") from error
    return h5py


@contextmanager
def open_hdf5(path: Path) -> Iterator[Any]:
    """A file of HDF5 to be read. What it has must lie in itself: `own` gets it.

    Raises:
        Unreadable: It is none, or is damaged; also where that is found within.
    """
    h5py = import_h5py(path)
    open_file(path).close()
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (UserError, MemoryError):
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, UnicodeError) as error:
        if isinstance(error, OSError) and error.filename:
            raise
        raise Unreadable(path, f"cannot be read as HDF5: {' '.join(str(error).split())[:200]}") from error


def own(path: Path, file: Any, name: str) -> Any:
    """A member of an HDF5 file, or None: links to other files, and values that lie in others, are refused."""
    h5py = import_h5py(path)
    if name not in file:
        if isinstance(file.get(name, getlink=True, default=None), h5py.ExternalLink):
            raise Unreadable(path, f"{name} is a link to another file, which is not followed")
        return None
    if isinstance(file.get(name, getlink=True), h5py.ExternalLink):
        raise Unreadable(path, f"{name} is a link to another file, which is not followed")
    found = file[name]
    if isinstance(found, h5py.Dataset):
        if found.external or found.is_virtual:
            raise Unreadable(path, f"the values of {name} lie in another file, which is not opened")
        check_filters(path, found, name)
    return found


def check_filters(path: Path, found: Any, name: str) -> None:
    """Refuse values that are packed by a filter which is loaded from elsewhere."""
    known = {1, 2, _FLETCHER32, 4, 6}  # deflate, shuffle, fletcher32, szip, scale-offset; nbit packs nothing of ours
    pipeline = found.id.get_create_plist()
    for place in range(pipeline.get_nfilters()):
        if (number := pipeline.get_filter(place)[0]) not in known:
            raise Unreadable(path, f"{name} is packed with the filter {number}, which is not run")
