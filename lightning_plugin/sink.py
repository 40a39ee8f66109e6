"""Sinks: what takes a result box by box, and the operator that gives it the boxes.

[Note: sinks] A result that is written is reduced like a loss: `Write` is a reduction whose tiles go to a sink, and
whose own result is the number of boxes. So no map is stored for it, and the last segment's tiles are all of it that is
ever in memory. Identical tiles are computed once and written to the box of each.

A box that was written is noted in a *record*, a file of lines. A run that finds the record of an interrupted one takes
its plan, computes the segments before again, and leaves out the tiles of the last one whose boxes are all noted. The
other tiles are the same computations on the same maps, so that all bytes are those of a run that was not interrupted. A
box is noted after it was written; one that was written and not noted is written again, with the same values.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from lightning_plugin.boxes import Box
from lightning_plugin.errors import SinkError
from lightning_plugin.layout import Axis, Dim, Layout
from lightning_plugin.ops import ReduceOp, Reduction
from lightning_plugin.private import FakeTensor
from lightning_plugin.source import release_pages

#: Side of a chunk of a new Zarr array, along the axes of space.
CHUNK = 512


@runtime_checkable
class Sink(Protocol):
    """Receiver of a result, box by box."""

    def open(self, shape: tuple[int, ...], dtype: torch.dtype, resumes: bool) -> None:
        """Prepare for a result, before its first box. An error here is raised before anything is computed.

        Args:
            shape: Shape of the result.
            dtype: Type of its values.
            resumes: An interrupted run has written some of the boxes, which stay.
        """

    def write(self, box: Box, values: Tensor) -> None:
        """Take the values of a box, which has an interval for each dimension of the result; they lie on the CPU."""

    def close(self) -> None:
        """Complete the result: called once, after the last box."""


class PathSink:
    """Base class of sinks into files at a path, beside which the record of the run lies."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def check(self, resumes: bool) -> None:
        """Refuse a path that is taken, or in no folder, before anything is made."""
        if not self.path.parent.is_dir():
            raise SinkError(f"{self.path.parent} is no folder that is there: make it first")
        if self.path.exists() and not resumes:
            raise SinkError(f"{self.path} is there already: remove it, or give another path")
        for partial in self.path.rglob("*.partial"):  # of a chunk that was being written
            partial.unlink()

    def open(self, shape: tuple[int, ...], dtype: torch.dtype, resumes: bool) -> None:
        raise NotImplementedError

    def write(self, box: Box, values: Tensor) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return


class ArraySink:
    """A tensor, or an array of the result's shape that takes values by slices: NumPy's, Zarr's, HDF5's."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __str__(self) -> str:
        return f"{type(self.array).__name__} of shape {tuple(self.array.shape)}"

    def open(self, shape: tuple[int, ...], dtype: torch.dtype, resumes: bool) -> None:
        if tuple(self.array.shape) != shape:
            raise SinkError(f"the sink is a {self}, and the result has the shape {shape}: give one of that shape")
        own = self.array.dtype if isinstance(self.array, Tensor) else torch_dtype(self.array.dtype)
        if torch.promote_types(dtype, own) != own:
            raise SinkError(
                f"the sink is a {self} of {own}, which cannot hold the result's {dtype}: give one of {dtype}"
            )

    def write(self, box: Box, values: Tensor) -> None:
        index = tuple(slice(lo, hi) for lo, hi in box.intervals())
        if isinstance(self.array, Tensor):
            self.array[index] = values.to(self.array.device)
            return
        self.array[index] = as_numpy(values)
        release_pages(self.array)

    def close(self) -> None:
        if isinstance(self.array, np.memmap):
            self.array.flush()


class FileSink(PathSink):
    """A new ``.npy`` or ``.zarr`` file."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.sink: ArraySink | None = None
        if self.path.suffix not in (".npy", ".zarr"):
            raise SinkError(f"{path} is no kind of file that is known: give NAME.npy, NAME.zarr, an array or a Sink")

    def open(self, shape: tuple[int, ...], dtype: torch.dtype, resumes: bool) -> None:
        kind = as_numpy(torch.empty(0, dtype=dtype)).dtype
        make = self.make_array if self.path.suffix == ".npy" else self.make_zarr
        self.sink = ArraySink(make(shape, kind))
        self.sink.open(shape, dtype, resumes)

    def make_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        make: Any = np.lib.format.open_memmap
        if self.path.exists():
            return make(self.path, "r+")
        partial = self.path.with_name(self.path.name + ".partial")  # it has its name once it is whole
        array = make(partial, "w+", dtype, shape)
        partial.rename(self.path)
        return array

    def make_zarr(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        import zarr  # takes a third of a second, which others need not wait for

        if (self.path / "zarr.json").exists():
            return zarr.open_array(self.path, mode="r+")
        chunks = (1, *(min(CHUNK, side) for side in shape[1:]))
        return zarr.create_array(self.path, shape=shape, dtype=dtype, chunks=chunks)

    def write(self, box: Box, values: Tensor) -> None:
        assert self.sink is not None
        self.sink.write(box, values)

    def close(self) -> None:
        assert self.sink is not None
        self.sink.close()


def sink_of(given: Any) -> Sink:
    """Return the sink for a path, a tensor, an array or a sink."""
    if isinstance(given, (str, Path)):
        return FileSink(given)
    if isinstance(given, Sink):
        return given
    if hasattr(given, "shape") and hasattr(given, "__setitem__"):
        return ArraySink(given)
    raise SinkError(f"a sink is a path, a tensor, an array or a lightning_plugin.Sink, not {type(given).__name__}")


def as_numpy(values: Tensor) -> np.ndarray:
    """Return the values as an array; bfloat16, which NumPy lacks, as float32."""
    found: np.ndarray = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return found


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return PyTorch's name of a type of NumPy's."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


@dataclass(eq=False)
class Record:
    """The boxes that were written, in a file unless there is none; see [Note: sinks].

    Attributes:
        path: The file.
        header: What the run is of; None before `begin`.
        done: The boxes that were written, each with the number of its result.
    """

    path: Path | None = None
    header: dict[str, Any] | None = None
    done: set[tuple[int, Box]] = field(default_factory=set)

    @staticmethod
    def at(path: Path | None) -> Record:
        """Read the record of an interrupted run; an empty one if there is none. A last line without an end is left
        out."""
        if path is None or not path.exists():
            return Record(path)
        try:
            first, *lines = path.read_text(encoding="utf-8").split("\n")[:-1] or [""]
            boxes = [json.loads(line) for line in lines]
            done = {(number, Box(tuple(lo), tuple(hi))) for number, lo, hi in boxes}
            return Record(path, json.loads(first) if first else None, done)
        except (ValueError, TypeError) as error:
            raise SinkError(
                f"{path} is no record of an interrupted run: remove it, and what it was written beside"
            ) from error

    def begin(self, header: Mapping[str, Any]) -> None:
        """Write down what the run is of, unless an interrupted one has."""
        if self.header is None:
            self.header = dict(header)
            if self.path is not None:
                self.path.write_text(json.dumps(self.header) + "\n", encoding="utf-8")

    def note(self, result: int, box: Box) -> None:
        """Note a box that was written."""
        self.done.add((result, box))
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([result, box.lo, box.hi]) + "\n")

    def finish(self) -> None:
        if self.path is not None:
            self.path.unlink()


@dataclass(frozen=True)
class Output:
    """A result, its sink and the record."""

    number: int
    sink: Sink
    record: Record

    def take(self, layout: Layout, box: Box, tile: Tensor) -> None:
        """Write the tile of a box of axes, and note it."""
        if (self.number, box) in self.record.done:
            return
        for region, values in regions(layout, box, tile):
            try:
                self.sink.write(region, values)
            except Exception as error:
                raise SinkError(f"result {self.number}: {self.sink} did not take the box {region}: {error}") from error
        self.record.note(self.number, box)

    def take_whole(self, values: Tensor) -> None:
        """Write a result that is an ordinary tensor."""
        shape = tuple(values.shape)
        layout = Layout(tuple((size,) for size in shape), ())
        self.take(layout, Box((), ()), values.resolve_conj().resolve_neg().cpu())


@dataclass(frozen=True)
class Write(ReduceOp):
    """Hand the tiles of a map to a sink; the result is their number. See [Note: sinks]."""

    kind: ClassVar[str] = "write"
    uniform: ClassVar[bool] = True
    layout: Layout
    output: Output = field(compare=False)

    def partial(self, box: Box, tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        return self.contribution([box], tiles, vectors)

    def contribution(self, boxes: Sequence[Box], tiles: Sequence[Tensor], vectors: Sequence[Tensor]) -> Reduction:
        tile = tiles[0].detach()
        if not isinstance(tile, FakeTensor):  # of a rehearsal
            values = tile.resolve_conj().resolve_neg().cpu()
            for box in boxes:
                self.output.take(self.layout, box, values)
        return Reduction((torch.full((), len(boxes), dtype=torch.int64, device=tile.device),))

    def needs_tile(self, box: Box) -> bool:
        return (self.output.number, box) not in self.output.record.done

    @property
    def start(self) -> Reduction:
        return Reduction((torch.zeros((), dtype=torch.int64),))

    def merge(self, left: Reduction, right: Reduction) -> Reduction:
        return Reduction((left.parts[0] + right.parts[0],))

    def finish(self, total: Reduction, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (total.parts[0],)

    def pull(self, box: Box, tiles: Any, vectors: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        return (None,)


def regions(layout: Layout, box: Box, tile: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield the regions of the result that a tile fills, each with its values: one, unless a dimension has an axis that
    is cut behind another factor, as tokens of an image cut along both its axes have."""
    for found in itertools.product(*(intervals(layout, dim, box) for dim in layout.dims)):
        region = Box.of(there for there, _ in found)
        yield region, tile[tuple(slice(lo, hi) for _, (lo, hi) in found)]


Interval = tuple[int, int]


def intervals(layout: Layout, dim: Dim, box: Box) -> list[tuple[Interval, Interval]]:
    """Return the intervals of a dimension that a box of axes fills, each with its place in the tile's dimension."""
    spans = [
        (box.lo[f.index], box.hi[f.index], layout.extent[f.index]) if isinstance(f, Axis) else (0, f, f) for f in dim
    ]
    length, whole = 1, 1  # of the last factors, which are not cut, and of the one before
    while spans:
        lo, hi, size = spans.pop()
        first, length = lo * whole, (hi - lo) * whole
        whole *= size
        if (lo, hi) != (0, size):
            break
    else:
        return [((0, length), (0, length))]
    starts = [0]
    for lo, hi, size in spans:
        starts = [start * size + i for start in starts for i in range(lo, hi)]
    return [
        ((start * whole + first, start * whole + first + length), (i * length, (i + 1) * length))
        for i, start in enumerate(starts)
    ]
