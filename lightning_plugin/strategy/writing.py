"""Checkpoints written from where their tensors lie."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lightning_plugin.strategy.bases import TorchCheckpointIO


class WholeCheckpoints(TorchCheckpointIO):
    """Checkpoints that are written whole or not at all, tensor by tensor from where each lies.

    Lightning makes a second copy of a checkpoint in memory and writes that to the folder for temporary files, which
    may have less room than where the checkpoint is to be. Paths that are no files of this machine are left to it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the file under its name once it is safe on the disk."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)  # type: ignore[misc]
        else:
            write(checkpoint, Path(path))


@dataclass
class Writer:
    """A file that is written to, and what has gone wrong there: PyTorch tells of it in words of its own."""

    file: BinaryIO
    failed: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.failed = error
            raise

    def flush(self) -> None:
        self.file.flush()


def write(checkpoint: dict[str, Any], target: Path) -> None:
    """Write a checkpoint beside its name, and give it the name when it is there; an error leaves what was before."""
    partial = target.with_name(f"{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def save(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    """Write a checkpoint into a file."""
    writer = Writer(file)
    try:
        torch.save(checkpoint, writer)  # type: ignore[arg-type]  # it asks for no more than this
    except RuntimeError as error:
        if writer.failed is None:
            raise
        raise writer.failed from error
