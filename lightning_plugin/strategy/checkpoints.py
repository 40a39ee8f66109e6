"""Checkpoints: written from where their tensors lie, with all that makes a resumed run the same run to the last bit.

Lightning saves no generator of random numbers; dropout and shuffling draw from them. A plan decides in which order sums
are taken, and so does the number of threads. All of it is kept in plain types: the checkpoint can be read without this
package, with ``weights_only=True`` too.
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

#: Key in a checkpoint.
KEY = "lightning_plugin"


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator a step may draw from."""
    version, internal, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(k) for k in keys], int(place), int(has_gauss), float(cached)],
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["device"] = torch.mps.get_rng_state()
    return state


def restore_random(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), place, has_gauss, cached))
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"].cpu(), device)
    elif "device" in state and device.type == "mps":
        torch.mps.set_rng_state(state["device"].cpu())


def restore_threads(count: int) -> None:
    """Sums over threads depend on how many there are."""
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
