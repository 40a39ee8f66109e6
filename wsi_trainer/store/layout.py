"""Layout of an image in a store: axes c, y, x; chunks of 512 px in shards of 4096 px; a pyramid by twos."""

from __future__ import annotations

from dataclasses import dataclass

CHANNELS = 3
PROVENANCE = "wsi_trainer"
"""The attribute of a store beside `ome` that says where it comes from and how it was made."""
FILL = 255
"""The value of absent chunks: white, as background nearly is."""


@dataclass(frozen=True)
class Layout:
    """Sizes in pixels of chunks, which are read, and of shards, which are written and are files."""

    chunk: int = 512
    shard: int = 4096

    def __post_init__(self) -> None:
        if self.chunk < 2 or self.chunk % 2 or self.shard % self.chunk:
            raise ValueError(f"chunk={self.chunk} must be even, and shard={self.shard} a multiple of it")

    @property
    def chunks_aside(self) -> int:
        """Chunks along one side of a shard."""
        return self.shard // self.chunk

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of shards that cover an image."""
        return -(-height // self.shard), -(-width // self.shard)


def pyramid(height: int, width: int, levels: int | None = None, smallest: int = 512) -> list[tuple[int, int]]:
    """Shapes of the levels, finest first: until one fits into `smallest`, or as many as asked for."""
    shapes = [(height, width)]
    while len(shapes) < levels if levels is not None else max(shapes[-1]) > smallest:
        shapes.append((-(-shapes[-1][0] // 2), -(-shapes[-1][1] // 2)))
    return shapes


def shard_key(level: int, row: int, column: int) -> str:
    """The path of a shard inside the store."""
    return f"{level}/c/0/{row}/{column}"
