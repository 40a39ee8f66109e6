"""The rates of this machine's own device: measured once, in seconds, and kept in the user's cache.

A file is valid for one device, one version of torch and one number of threads. Plans depend on rates, so nothing is
measured behind the user's back: without a file the built-in table ranks the plans.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_plugin.boxes import Grid
from lightning_plugin.execute.frame import Frame, Step
from lightning_plugin.execute.run import run_plan
from lightning_plugin.layout import Layout
from lightning_plugin.memory import machine_memory
from lightning_plugin.planner import cache
from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.planner.costs.rates import Rates, is_here, kinds, rates_of
from lightning_plugin.planner.search.predict import predict
from lightning_plugin.private import tree_leaves
from lightning_plugin.program.findings import Library
from lightning_plugin.program.fixed import fixed_plan
from lightning_plugin.residency.disk import DiskFile, UnnamedFile
from lightning_plugin.residency.tiers import LowerMap
from lightning_plugin.residency.transfer import TransferQueue

log = logging.getLogger(__name__)

CPUINFO = Path("/proc/cpuinfo")
#: Sides of timed maps on a CPU and on an accelerator: long enough for a clock, short enough for a user.
SIDES = {"cpu": 96, "cuda": 1024, "mps": 512}
#: Ratio of the sides of maps in fresh memory to those of maps in a cache.
LARGER = {"cpu": 5, "cuda": 2, "mps": 2}
CHANNELS = 64
SMALL = 8
CALLS = 200
#: A network in tiny tiles: its blocks of layers, and the tiles along each side.
BLOCKS, TILES = 4, 6
TRANSFER = 128 * 2**20
#: A map in a file: the sides of its tiles, and how many there are along each of its own.
FILE_SIDE, FILE_TILES = 256, 3
REPEATS = 5


def calibrate(device: str | torch.device | None = None) -> Rates:
    """Measure how fast this machine's device is, and keep the result for later plans.

    It takes some seconds, in which nothing else should run. `TiledModule` and the strategies use the result from then
    on, and so does `make_plan` where ``device`` is this device's kind (``"cpu"``, ``"cuda"``). Plans that exist are not
    changed, nor are those of a run that is resumed.
    """
    found = local(device)
    rates, path = measure(found), file_of(found)
    if path is not None:
        cache.write(path, asdict(rates))
    return rates


def calibrated(device: str | torch.device | None = None) -> Rates | None:
    """Rates that `calibrate` measured for this device, this version of torch and this number of threads; None if it has
    not."""
    path = file_of(local(device))
    if path is None or not path.is_file():
        return None
    try:
        return Rates(**cache.read(path))
    except (OSError, ValueError) as error:
        log.warning("%s is ignored (%s); lightning_plugin.calibrate() writes it anew", path, error)
        return None


def local_rates(device: str) -> Rates:
    """The rates of a device by name: measured, where it is this machine's own and was calibrated, else the table's."""
    if is_here(device):
        found = calibrated(device)
        if found is not None:
            return found
    return rates_of(device)


def local(device: str | torch.device | None) -> torch.device:
    """A device by its name; by default the accelerator, if there is one."""
    found = torch.device(device if device is not None else kinds()[-1])
    if found.type not in kinds():
        raise ValueError(f"this machine has no device {found.type!r} to measure; it has {', '.join(kinds())}")
    return found


def file_of(device: torch.device) -> Path | None:
    """The file of the rates measured for a device, this version of torch and this number of threads."""
    rates = sorted(f.name for f in fields(Rates))
    about = (name_of(device), torch.__version__, torch.get_num_threads(), rates)
    return cache.file_of(f"rates-{cache.digest_of(repr(about))[:16]}.json")


def name_of(device: torch.device) -> str:
    """The name of a device's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if CPUINFO.is_file():
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{device.type}, {line.partition(':')[2].strip()}"
    return f"{device.type}, {platform.processor() or platform.machine()}"


# Measurements -----------------------------------------------------------------------------------------------


def measure(device: torch.device) -> Rates:
    """Rates measured by timing convolutions, pointwise operators and a pool, small operators and transfers."""
    side = SIDES[device.type]
    large = LARGER[device.type] * side
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        near, memory, flops = pointwise(device, side), pointwise(device, large), convolution(device)
        found = Rates(
            flops=flops,
            memory=memory,
            host=memory if device.type == "cpu" else to_host(device),
            disk=to_disk(),
            file=to_file(),
            cache=memory_for_files(),
            call=call(device),
            near=max(near, memory),
            reorder=reorder(device, large, flops, memory),
            pool=min(near, pool(device)),
            workspace=workspace(device),
        )
        return replace(found, call=max(found.call, call_of_tiles(device, found)))


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest time of a call among several, after a first one: whatever else the machine does only adds to it."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    times = []
    for _ in range(1 + REPEATS):
        synchronize(device)
        begin = clock()
        run()
        synchronize(device)
        times.append(clock() - begin)
    return max(min(times[1:]), 1e-9)


def synchronize(device: torch.device) -> None:
    """Wait for pending work of an accelerator."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def forward_and_backward(function: Callable[[Tensor], Tensor], x: Tensor, *more: Tensor) -> Callable[[], object]:
    """Forward and backward with respect to the input and ``more`` tensors."""
    cotangent = torch.ones_like(function(x).detach())
    return lambda: torch.autograd.grad(function(x), (x, *more), cotangent)


def image(device: torch.device, channels: int, side: int) -> Tensor:
    return torch.rand(1, channels, side, side, device=device, requires_grad=True)


def convolution(device: torch.device) -> float:
    """Floating-point operations a second of a 3×3 convolution, forward and backward."""
    side = SIDES[device.type]
    x = image(device, CHANNELS, side)
    weight = torch.rand(CHANNELS, CHANNELS, 3, 3, device=device, requires_grad=True)
    run = forward_and_backward(lambda t: functional.conv2d(t, weight, padding=1), x, weight)
    return 3 * 2 * CHANNELS * CHANNELS * 9 * side**2 / seconds(run, device)


def pointwise(device: torch.device, side: int) -> float:
    """Bytes a second that an operator without arithmetic to speak of reads and writes, forward and backward."""
    x = image(device, CHANNELS, side)
    run = forward_and_backward(functional.relu, x)
    return 2 * 2 * x.nbytes / seconds(run, device)


def reorder(device: torch.device, side: int, flops: float, memory: float) -> float:
    """Bytes a second that a convolution on large maps moves in the time beyond its arithmetic."""
    x = image(device, SMALL, side)
    weight = torch.rand(CHANNELS, SMALL, 3, 3, device=device, requires_grad=True)
    taken = seconds(forward_and_backward(lambda t: functional.conv2d(t, weight, padding=1), x, weight), device)
    arithmetic = 3 * 2 * CHANNELS * SMALL * 9 * side**2 / flops
    moved = 3 * (x.nbytes + x.nbytes // SMALL * CHANNELS)
    return min(memory, moved / max(taken - arithmetic, 1e-9))


def pool(device: torch.device) -> float:
    """Bytes a second that a maximum over windows reads and writes, forward and backward."""
    x = image(device, CHANNELS, SIDES[device.type])
    return (
        2 * (x.nbytes + x.nbytes // 4) / seconds(forward_and_backward(lambda t: functional.max_pool2d(t, 2), x), device)
    )


def workspace(device: torch.device) -> int:
    """The most bytes that a convolution, its backward or a matrix product takes beside its result."""
    if device.type != "cuda":
        return 0
    sizes = ((CHANNELS, SIDES["cuda"]), (8 * CHANNELS, SIDES["cuda"] // 8))
    return max(
        extra_peak_bytes(run, device) for channels, side in sizes for run in workspace_calls(device, channels, side)
    )


def workspace_calls(device: torch.device, channels: int, side: int) -> list[Callable[[], object]]:
    """Calls of operators whose libraries allocate workspaces."""
    x = torch.rand(1, channels, side, side, device=device)
    weight = torch.rand(channels, channels, 3, 3, device=device)
    shape = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    wanted = [True, True, False]
    return [
        lambda: functional.conv2d(x, weight, padding=1),
        lambda: torch.ops.aten.convolution_backward(x, x, weight, None, *shape, wanted),
        lambda: weight.flatten(1) @ weight.flatten(1).T,
    ]


def extra_peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak bytes that the allocator gives out during a call, beyond its results."""
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = [t for t in tree_leaves(run()) if isinstance(t, Tensor)]
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - sum(t.nbytes for t in results)


def call(device: torch.device) -> float:
    """Seconds to start an operator, forward and backward, on next to no data."""
    x = image(device, 1, SMALL)

    def chain(t: Tensor) -> Tensor:
        for _ in range(CALLS):
            t = functional.relu(t)
        return t

    return seconds(forward_and_backward(chain, x), device) / (3 * CALLS)


def call_of_tiles(device: torch.device, rates: Rates) -> float:
    """Seconds to start an operator of a tile: with them, a step in tiny tiles takes what the cost model says."""
    layers = [layer for _ in range(BLOCKS) for layer in (nn.Conv2d(SMALL, SMALL, 1), nn.BatchNorm2d(SMALL), nn.ReLU())]
    network = nn.Sequential(nn.Conv2d(1, SMALL, 1), *layers).to(device).eval()
    pixels, grid, library = image(device, 1, SMALL * TILES).detach(), Grid((TILES, TILES)), Library()
    with recorded(network, pixels, pixels.dtype) as (planned, _):
        recording = planned.recording
        plan, (loss,) = fixed_plan(recording.nodes, grid, grid), recording.nodes[-1].outputs

        def step() -> None:
            frame = Frame(recording.bindings, step=Step(library=library))
            run_plan(plan, recording, frame)
            frame.vectors[loss].backward()

        taken = seconds(step, device)
        least, most = (predict(plan, planned, replace(rates, call=call)) for call in (0.0, 1.0))
    return (taken - least) / (most - least)


def to_host(device: torch.device) -> float:
    """Bytes a second between the device and pinned memory of the host, there and back."""
    pinned = torch.empty(TRANSFER, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(TRANSFER, dtype=torch.uint8, device=device)

    def both() -> None:
        pinned.copy_(there)
        there.copy_(pinned)

    return 2 * TRANSFER / seconds(both, device)


def memory_for_files() -> int:
    """Bytes of files that stay in the system's memory: a fifth of it, which Linux lets wait to be written."""
    return machine_memory() // 5


def to_file() -> float:
    """Bytes a second of a map, tile by tile, to and from a file that the system keeps in its memory."""
    cpu = torch.device("cpu")
    tile = torch.rand(1, CHANNELS, FILE_SIDE, FILE_SIDE)
    layout = Layout.channels_first((1, CHANNELS, FILE_TILES * FILE_SIDE, FILE_TILES * FILE_SIDE))
    boxes = [box for (box,) in Grid((FILE_TILES, FILE_TILES)).partition([layout.extent])]

    def both() -> None:
        lower_map = LowerMap(DiskFile(layout, tile.dtype, cpu), TransferQueue())
        lower_map.set_largest_tile(FILE_SIDE**2)
        for box in boxes:
            lower_map.write(box, tile)
        for box in boxes:
            lower_map.read(box)

    return 2 * len(boxes) * tile.nbytes / seconds(both, cpu)


def to_disk() -> float:
    """Bytes a second to and from a temporary file, once they are really written and no longer in the system's cache."""
    data = memoryview(bytearray(os.urandom(TRANSFER)))
    file = UnnamedFile("data to measure the disk")
    begin = time.perf_counter()
    file.write(data, 0)
    os.fsync(file.number)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.number, 0, 0, os.POSIX_FADV_DONTNEED)
    file.read(data, 0)
    return 2 * TRANSFER / (time.perf_counter() - begin)
