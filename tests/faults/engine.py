"""Steps of the engine with faults: maps on the host and on the disk, streamed parameters, a slide that is read ahead.

Each world takes one step in which the n-th call fails. It ends in an error of the system's or of the engine's, or is
exact. Then the same module takes a step without a fault, and that is exact, against plain PyTorch; what a step holds
(descriptors, threads, temporary files, memory beside the budget) is what it held before. All n run in one process, so
that what leaks adds up.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zarr
from torch import Tensor, nn

from lightning_plugin import Box, EngineError, LazyImage, TiledModule, TileSource
from tests.exactness import TOLERANCE, difference
from tests.faults.commands import bring
from tests.faults.kinds import KINDS
from tests.faults.runs import Server
from tests.faults.seam import FROM_THEN_ON, Seam
from tests.lightning_plugin.test_store import lower
from tests.lightning_plugin.test_streamed import Encoder, tight
from wsi_trainer.slides.source import SlideSource

NAMES = (
    "EIO once", "EIO from then on", "disk full once", "disk full from then on", "EINTR", "too many open files once",
    "short read", "short write", "short reads and writes, all", "slow disk", "no memory once",
    "no process or thread once", "no process or thread from then on",
)  # fmt: skip
LEAST = 1024
"""Bytes from which on memory is counted: maps here are small."""
LONGEST = 3600.0
"""Seconds of a world's campaign: after so long it hangs."""
SETTLING = 1.0
"""Seconds that threads have to end; those of a source stay."""


@dataclass
class World:
    """A module that takes steps, and the same one in plain PyTorch."""

    step: Callable[[], Tensor]
    net: nn.Module
    plain: nn.Module
    pixels: Tensor
    budget: Callable[[], bool] = lambda: True

    def expected(self) -> dict[str, Tensor]:
        loss = self.plain(self.pixels).square().sum()
        loss.backward()
        return {"loss": loss.detach(), **gradients(self.plain)}

    def wrong(self, expected: Mapping[str, Tensor], loss: Tensor) -> str:
        """What of a step is not exact."""
        found = {"loss": loss.detach(), **gradients(self.net)}
        floor = 1e-3 * max(float(value.abs().max()) for value in expected.values())
        for name, value in expected.items():
            if (error := difference(found[name], value, floor)) > TOLERANCE:
                return f"{name} is off by {error:.1e}"
        return ""


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in net.named_parameters() if p.grad is not None}


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
        nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    ).double()  # fmt: skip


def maps(tier: str) -> World:
    """Maps on a lower tier, transferred ahead."""
    net, pixels = network(), torch.randn(1, 3, 48, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plain = copy.deepcopy(net)
    return World(
        lambda: net(LazyImage.from_tensor(pixels, settings=lower(tier, True))).square().sum(), net, plain, pixels
    )


def streamed() -> World:
    """Parameters on the disk, under a budget of less than they take."""
    torch.manual_seed(3)
    net = Encoder().double()
    plain = copy.deepcopy(net)
    pixels = torch.randn(6, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    tiled = tight(net, parameters="disk")
    return World(
        lambda: tiled(pixels).square().sum(), net, plain, pixels,
        lambda: tiled.plan is not None and tiled.peak_bytes <= tiled.plan.budget,  # type: ignore[operator]
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Doubles:
    """A source of bytes as one of float64."""

    source: SlideSource

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    def read(self, box: Box) -> Tensor:
        return self.source.read(box).double() / 255

    def constant(self, box: Box) -> Tensor | None:
        return None

    def prefetch(self, boxes: Any) -> None:
        self.source.prefetch(boxes)


def slide() -> World:
    """A store that is read ahead, tile by tile, within a budget."""
    net = network()
    path = sorted(Path("in/stores").glob("*.zarr"))[0].absolute()
    zarr.open_array(path / "0", mode="r")[:1, :1, :1]  # its threads are begun once in a process
    whole = SlideSource(path)
    pixels = whole.read(Box.whole(whole.shape[2:])).double() / 255
    plain, tiled = copy.deepcopy(net), TiledModule(net, budget="1.5MiB")

    def step() -> Tensor:
        source: TileSource = Doubles(SlideSource(path))
        return tiled(LazyImage(source)).square().sum()  # type: ignore[no-any-return]

    return World(step, net, plain, pixels)


WORLDS: Mapping[str, Callable[[], World]] = {
    "a step, maps on the disk": lambda: maps("disk"),
    "a step, maps on the host": lambda: maps("host"),
    "a step, parameters on the disk": streamed,
    "a step, a slide read ahead": slide,
}


def held() -> dict[str, int]:
    """What a process holds between steps."""
    gc.collect()
    until = time.monotonic() + SETTLING
    while threading.active_count() > 1 and time.monotonic() < until:
        gc.collect()
        time.sleep(0.002)
    own = sum(not thread.name.startswith(("asyncio", "zarr")) for thread in threading.enumerate())  # zarr's pool grows
    files = sum(len(names) for _, _, names in os.walk(tempfile.gettempdir()))
    return {"files": files, "descriptors": len(os.listdir("/proc/self/fd")), "threads": own}


def clear(error: BaseException) -> str:
    """What is wrong with an error, or nothing."""
    if isinstance(error, EngineError | OSError | MemoryError):
        return ""
    from wsi_trainer.cli.entry import as_user_error

    known = isinstance(error, Exception) and as_user_error(error) is not None
    return "" if known else f"{type(error).__name__}: {error}"


def campaign(words: list[str]) -> int:
    """Faults in a world: for each kind n from 1 on, some of them where there are many.

    Args:
        words: The file of the setting, its root, the world, the most faults of a kind, and the file for outcomes.
    """
    file, root, name, most, out = Path(words[0]), Path(words[1]), words[2], int(words[3]), Path(words[4])
    torch.set_num_threads(1)
    seam = Seam.attached(file, root)
    world = WORLDS[name]()
    expected = world.expected()
    world.step().backward()  # what a first step makes and keeps is there
    world.net.zero_grad()
    at_rest = held()
    rows = []
    for kind_name in NAMES:
        kind = KINDS[kind_name]
        attempt(seam, world, kind_name, 0)
        world.net.zero_grad()
        calls = int(seam.setting.count)
        stride = 1 if kind.once else -(-calls // most) if calls else 1
        numbers = [1] if kind.once and calls else list(range(1, calls + 1, stride))
        row: dict[str, Any] = {
            "command": name, "kind": kind_name, "calls": calls, "injected": 0, "right": 0, "recovered": 0, "defects": 0,
            "why": [],
        }  # fmt: skip
        for n in numbers:
            error, loss = attempt(seam, world, kind_name, n)
            if not seam.setting.fired:
                continue
            row["injected"] += 1
            struck = seam.struck()
            ended = error is not None
            why = clear(error) if error is not None else world.wrong(expected, loss) if loss is not None else "no loss"
            del error, loss
            world.net.zero_grad()
            try:
                why = why or (world.wrong(expected, whole_step(world)) and "the next step is not exact")
                if not why and not world.budget():
                    why = "the next step is over the budget"
            except Exception as after:
                why = why or f"the next step fails: {type(after).__name__}: {after}"
            world.net.zero_grad()
            now = held()
            if not why and now != at_rest:
                why = f"it holds {now} instead of {at_rest}"
                at_rest = now
            verdict = "defects" if why else "recovered" if ended else "right"
            row[verdict] += 1
            if why:
                row["why"].append(f"n={n} [{struck}]: {why}")
        rows.append(row)
    out.write_text(json.dumps(rows))
    return 0


def rows_of(server: Server, name: str, most: int) -> list[dict[str, Any]]:
    """The campaign of a world, in a process of the server."""
    bring(server, "slides")
    out = server.place.base / "rows.json"
    out.unlink(missing_ok=True)
    words = [str(server.seam.file), str(server.place.now), name, str(most), str(out)]
    ended = server.end(server.begin(words, "tests.faults.engine:campaign"), limit=LONGEST)
    if ended.code != 0:
        raise RuntimeError(f"{name}: exit code {ended.code}: {ended.said[-3000:]}")
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


def attempt(seam: Seam, world: World, kind_name: str, n: int) -> tuple[BaseException | None, Tensor | None]:
    """One step in which the n-th call fails; with 0 calls are only counted."""
    kind = KINDS[kind_name]
    action = kind.action if n else "through"
    times = kind.times if kind.times == 1 else FROM_THEN_ON
    seam.arm(kind.calls, action, kind.value, first=max(n, 1), times=times, least=LEAST)
    seam.setting.armed = 1
    try:
        return None, whole_step(world)
    except Exception as error:
        return error.with_traceback(None), None
    finally:
        seam.disarm()


def whole_step(world: World) -> Tensor:
    loss = world.step()
    loss.backward()
    return loss.detach()
