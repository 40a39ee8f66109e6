"""The device, the memory and the disk that a run would have."""

import os
import shutil
import tempfile
from pathlib import Path

from wsi_trainer.doctor.check import Check, Status, attempt

GIB = 1024**3
LOW_DISK = 10 * GIB
GROUP = "machine"


def check_machine(folder: Path) -> list[Check]:
    """Device, memory, cores and the free disk of the working and the temporary folder."""
    return [
        attempt(GROUP, "device", device, "pip install 'torch>=2.11,<2.14'"),
        attempt(GROUP, "memory", memory),
        Check(GROUP, "cores", Status.OK, f"{usable_cores()} usable of {os.cpu_count()}"),
        rates(),
        disk("disk, working folder", folder),
        disk("disk, temporary folder", Path(tempfile.gettempdir())),
    ]


def device() -> str:
    """The device that training would use, after one small convolution and its backward on it."""
    import torch

    name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    convolution = torch.nn.Conv2d(3, 4, 3).to(name)
    convolution(torch.ones(1, 3, 8, 8, device=name)).sum().backward()
    if name == "cuda":
        found = torch.cuda.get_device_properties(0)
        return f"cuda: {torch.cuda.device_count()} × {found.name}, {size(found.total_memory)} each"
    return f"{name}: {torch.get_num_threads()} threads, torch {torch.__version__}"


def memory() -> str:
    """The memory of this process: the machine's, or the limit of its container or job if that is smaller."""
    # The default budget is made of the same numbers; the engine is slow to import.
    from lightning_plugin.memory import machine_memory, total_memory

    limit, total = machine_memory(), total_memory()
    if limit < total:
        return f"{size(limit)} (limit of the container or the job; the machine has {size(total)})"
    return size(total)


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rates() -> Check:
    """How fast the device is, by which plans are ranked: as measured, or not measured yet."""
    from lightning_plugin import calibrated

    found = calibrated()
    if found is None:
        detail = "not measured: built-in figures rank the plans"
        return Check(GROUP, "rates", Status.ABSENT, detail, "wsi-train doctor --calibrate")
    figures = (
        f"{found.flops / 1e9:.0f} GFLOP/s, memory {found.memory / 1e9:.1f} GB/s, host {found.host / 1e9:.1f} GB/s, "
        f"disk {found.disk / 1e9:.2f} GB/s (files in memory {found.file / 1e9:.2f} GB/s), "
        f"{found.call * 1e6:.0f} µs for a call"
    )
    return Check(GROUP, "rates", Status.OK, figures)


def disk(name: str, folder: Path) -> Check:
    """The free space of a folder: a warning where it is too little for slides."""
    free = shutil.disk_usage(folder).free
    if free < LOW_DISK:
        fix = f"free some space, or work in a folder with more than {size(LOW_DISK)}"
        return Check(GROUP, name, Status.WARNING, f"{size(free)} free in {folder}", fix)
    return Check(GROUP, name, Status.OK, f"{size(free)} free in {folder}")


def size(count: int) -> str:
    """Bytes as GiB."""
    return f"{count / GIB:.1f} GiB"
