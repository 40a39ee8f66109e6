"""Checkpoints: streamed to the disk tensor by tensor, with the state that a bit-identical resume needs.

Lightning saves no random generators; dropout and shuffling draw from them. The order of sums depends on the plan and on
the number of threads. These are saved as plain types, so that a checkpoint can be read without this package, with
``weights_only=True`` too.
"""

from __future__ import annotations

import logging
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from lightning_plugin.strategy.bases import TorchCheckpointIO

log = logging.getLogger(__name__)

#: Key of this package's state in a checkpoint.
KEY = "lightning_plugin"


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every random generator that a step may draw from."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["device"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"].cpu(), device)
    elif "device" in state and device.type == "mps":
        torch.mps.set_rng_state(state["device"].cpu())


def restore_threads(count: int) -> None:
    """Set the number of threads to a checkpoint's: it decides how sums round. Warn if the machine has fewer."""
    if count == torch.get_num_threads():
        return
    if count <= (os.cpu_count() or 1):
        torch.set_num_threads(count)
        return
    log.warning(
        "the checkpoint was written with %d threads, this machine has %s processors: sums round differently, so the "
        "continued run will agree with the uninterrupted one only up to rounding",
        count,
        os.cpu_count(),
    )


class WholeCheckpoints(TorchCheckpointIO):
    """Writer of checkpoints: atomic, and without a second copy in memory.

    Lightning serialises a checkpoint in memory first, and writes it to the system's folder of temporary files, which
    may have less room than the target. Remote paths (``s3://...``) are left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint to a partial file beside ``path``, then rename it."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)  # type: ignore[misc]
        else:
            write_atomically(checkpoint, Path(path))


@dataclass
class Writer:
    """File for `torch.save` that remembers an `OSError`: PyTorch raises a `RuntimeError` without its cause instead."""

    file: BinaryIO
    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def write_atomically(checkpoint: dict[str, Any], target: Path) -> None:
    """Write a checkpoint to a partial file, sync it and rename it; after an error the former file is still there."""
    partial = target.with_name(f"{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            save_to_file(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def save_to_file(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    """Run `torch.save`, and raise the `OSError` behind its `RuntimeError`."""
    writer = Writer(file)
    try:
        torch.save(checkpoint, writer)  # type: ignore[arg-type]  # it calls write and flush only
    except RuntimeError as error:
        if writer.error is None:
            raise
        raise writer.error from error
