"""Rates of a device: operations, memory and transfers a second, as far as ranking plans needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

#: Maps up to this size, in bytes, stay in a cache and in memory that is used again; from the second on, each lies in
#: fresh pages, which the system fills with zeros first.
NEAR, FAR = 4 << 20, 32 << 20


@dataclass(frozen=True)
class Rates:
    """Sustained rates, a second.

    Attributes:
        flops: Floating-point operations.
        memory: Bytes of device memory, of operators on large maps.
        host: Bytes to the host, or back.
        disk: Bytes to the disk, or back.
        call: Seconds of starting one operator.
        near: Bytes of device memory, of operators on maps that stay in a cache; by default as ``memory``.
        reorder: Bytes that an operator with arithmetic moves besides, on large maps; by default as ``memory``.
        pool: Bytes of a window without arithmetic; by default as ``memory``.
        file: Bytes to or from a file that stays in the system's memory; by default as ``disk``.
        cache: Bytes of files in all that stay in the system's memory.
        workspace: Bytes that the device's libraries take beside tensors while an operator runs. A plan leaves them
            free, as far as they are no more than a part of the budget.
    """

    flops: float
    memory: float
    host: float
    disk: float
    call: float
    near: float = 0.0
    reorder: float = 0.0
    pool: float = 0.0
    file: float = 0.0
    cache: int = 0
    workspace: int = 0

    def __post_init__(self) -> None:
        for name in ("near", "reorder", "pool"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.memory)
        if not self.file:
            object.__setattr__(self, "file", self.disk)

    def byte(self, size: Any, far: Any) -> Any:
        """Seconds for a byte of maps of ``size`` bytes, one or many at once; ``far`` is the rate of large ones."""
        large = np.minimum(1.0, np.maximum(0.0, (size - NEAR) / (FAR - NEAR)))
        return (1 - large) / np.maximum(self.near, far) + large / far


#: On CUDA, PyTorch's allocator also gives cuBLAS its workspace (8 MiB, on Hopper 32), which stays, and cuDNN one for
#: each call, which depends on the algorithm and has no bound that could be known before. So much is allowed for both
#: until `calibrate` has looked. On a CPU such memory is not the allocator's, and no ledger's.
WORKSPACE, WORKSPACE_OF_HOPPER = 64 << 20, 128 << 20

#: For a CPU without other figures: Linux lets a fifth of memory wait to be written to the disk, here of 20 GiB.
FILE, CACHE = 2.4e9, 4 << 30

#: Rates of common devices for float32 convolutions with tensor cores where they are on by default. They rank plans;
#: they are not a benchmark. Memory and transfer figures are two thirds of the data sheet's.
RATES = {
    "cpu": Rates(60e9, 5e9, 8e9, disk=0.8e9, call=20e-6, near=20e9, reorder=2e9, pool=1.5e9, file=FILE, cache=CACHE),
    "mps": Rates(flops=3e12, memory=100e9, host=50e9, disk=2e9, call=20e-6),
    "cuda": Rates(flops=10e12, memory=400e9, host=12e9, disk=2e9, call=8e-6, workspace=WORKSPACE),
    "cuda:rtx2080ti": Rates(flops=9e12, memory=400e9, host=10e9, disk=2e9, call=8e-6, workspace=WORKSPACE),
    "cuda:rtx3090": Rates(flops=20e12, memory=600e9, host=20e9, disk=3e9, call=8e-6, workspace=WORKSPACE),
    "cuda:rtx4090": Rates(flops=45e12, memory=650e9, host=20e9, disk=3e9, call=7e-6, workspace=WORKSPACE),
    "cuda:a100": Rates(flops=60e12, memory=1000e9, host=20e9, disk=3e9, call=8e-6, workspace=WORKSPACE),
    "cuda:h100": Rates(flops=200e12, memory=2000e9, host=40e9, disk=4e9, call=7e-6, workspace=WORKSPACE_OF_HOPPER),
    "cuda:h200": Rates(flops=200e12, memory=3000e9, host=40e9, disk=4e9, call=7e-6, workspace=WORKSPACE_OF_HOPPER),
}


def rates_of(device: str) -> Rates:
    """The rates of a device by name, or by its kind if the name is not in the table."""
    if device in RATES:
        return RATES[device]
    kind = device.split(":")[0]
    if kind in RATES and (device == kind or device.split(":")[1].isdigit()):
        return RATES[kind]
    raise ValueError(f"no rates for device {device!r}; known are {', '.join(sorted(RATES))}")


def kinds() -> list[str]:
    """The kinds of devices that this machine has."""
    accelerators = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return ["cpu", *(name for name, there in accelerators.items() if there)]


def is_here(device: str) -> bool:
    """True for a device of this machine: a kind that it has, with or without a number, and no card by its name."""
    kind, _, number = device.partition(":")
    return kind in kinds() and (not number or number.isdigit())
