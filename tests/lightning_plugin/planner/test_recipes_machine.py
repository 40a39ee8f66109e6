"""Whatever happens to the cache of recipes, steps are exact and keep their budget, and nobody sees an error of it.

A machine of hypothesis takes steps on images of some sizes under some budgets, by modules that know nothing yet or
something, in several threads and in processes that are killed; and it damages and ages what lies in the cache,
fills the disk and takes the folder away. What a step holds it counts by itself.
"""

from __future__ import annotations

import copy
import errno
import os
import shutil
import signal
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_plugin import BudgetError, TiledModule
from lightning_plugin.planner import cache
from lightning_plugin.planner.cache import VARIABLE
from tests.exactness import TOLERANCE, difference
from tests.machines import DAMAGES, Machine, go_through
from tests.stopping import counting
from tests.warm import start

#: What may be left of a step before: a loss or so.
SCRAPS = 1024
SIDES = st.tuples(st.integers(56, 64), st.integers(52, 60))
BUDGETS = st.sampled_from([90_000, 120_000, 200_000, 400_000])
NETS = st.integers(0, 1)


def network(which: int) -> nn.Module:
    torch.manual_seed(which)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4 + which, 3)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()


class Held(TorchDispatchMode):
    """The most bytes of tensors with data that lived at once, of those that were made within."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, Tensor) or isinstance(t, FakeTensor) or t.device.type == "meta":
                continue
            storage = t.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.known and key not in given and size:
                self.known.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, key, size).atexit = False
        return out


def step(which: int, sides: tuple[int, int], budget: int, tiled: TiledModule | None = None, count: bool = True) -> bool:
    """A step on an image, compared with plain PyTorch; whether there was a plan for it."""
    image = torch.randn(1, 3, *sides, dtype=torch.float64, generator=torch.Generator().manual_seed(sides[0]))
    if tiled is None:
        tiled = TiledModule(network(which), budget=budget)
    plain = copy.deepcopy(tiled.module)
    tiled.zero_grad()
    plain.zero_grad()
    held = Held()
    try:
        with held if count else nullcontext():
            out = tiled(image)
            out.square().sum().backward()
    except BudgetError:
        return False
    expected = plain(image)
    expected.square().sum().backward()
    assert difference(out.detach(), expected.detach()) < TOLERANCE
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    largest = max(float(g.abs().max()) for g in grads)
    for p, g in zip(tiled.parameters(), grads, strict=True):
        assert p.grad is not None and difference(p.grad, g, 1e-3 * largest) < TOLERANCE
    for b, c in zip(tiled.buffers(), plain.buffers(), strict=True):
        assert difference(b.double(), c.double()) < TOLERANCE
    lasting = sum(p.nbytes for p in tiled.parameters())
    assert not count or held.most + lasting <= budget + SCRAPS, (
        f"{held.most + lasting} bytes were held under {tiled.plan}"
    )
    return True


def process(folder: str, which: int, sides: tuple[int, int], budget: int, touches: int) -> NoReturn:
    """A process that takes a step, and kills itself at that many touches of the cache."""
    counting(folder, touches, signal.SIGKILL)
    step(which, sides, budget)
    os._exit(0)


class Recipes(Machine):
    """A folder of recipes, and modules that have planned already."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.cache = self.root / "cache"
        self.folder = self.cache / "recipes"
        self.environment = mock.patch.dict(os.environ, {VARIABLE: str(self.cache)})
        self.environment.start()
        self.bound = mock.patch.object(cache, "MOST_FILES", 4)
        self.bound.start()
        self.modules: dict[tuple[int, int], TiledModule] = {}
        self.killed = False

    def teardown(self) -> None:
        self.environment.stop()
        self.bound.stop()
        shutil.rmtree(self.root)

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.json") if path.is_file())

    def does(self, which: int, sides: tuple[int, int], budget: int, tiled: TiledModule | None = None) -> None:
        if step(which, sides, budget, tiled):
            return
        with mock.patch.dict(os.environ, {VARIABLE: ""}):
            assert not step(which, sides, budget), "there is a plan without the cache"

    @rule(which=NETS, sides=SIDES, budget=BUDGETS)
    def a_new_module(self, which: int, sides: tuple[int, int], budget: int) -> None:
        tiled = TiledModule(network(which), budget=budget)
        self.does(which, sides, budget, tiled)
        self.modules[which, budget] = tiled

    @precondition(lambda self: self.modules)
    @rule(data=st.data(), sides=SIDES)
    def one_that_knows(self, data: st.DataObject, sides: tuple[int, int]) -> None:
        which, budget = data.draw(st.sampled_from(sorted(self.modules)))
        self.does(which, sides, budget, self.modules[which, budget])

    @rule(which=NETS, all_sides=st.lists(SIDES, min_size=2, max_size=3), budget=BUDGETS)
    def threads(self, which: int, all_sides: list[tuple[int, int]], budget: int) -> None:
        self.counted["concurrent"] += 1
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda sides: step(which, sides, budget, count=False), all_sides))

    @rule(which=NETS, sides=SIDES, budget=st.sampled_from([200_000, 400_000]), touches=st.integers(1, 8))
    def a_process_is_killed(self, which: int, sides: tuple[int, int], budget: int, touches: int) -> None:
        """Meanwhile this one plans the same."""
        self.killed = True
        self.counted["kills"] += 1
        self.counted["concurrent"] += 1
        log = self.root / "log"
        other = start(
            log, process, str(self.cache), which, sides, budget, touches, environment={VARIABLE: str(self.cache)}
        )
        self.does(which, sides, budget)
        other.join()
        assert other.exitcode in (0, -signal.SIGKILL), log.read_text()

    @precondition(lambda self: self.files())
    @rule(data=st.data(), kind=st.sampled_from(sorted(DAMAGES)), place=st.floats(0, 0.999))
    def damage(self, data: st.DataObject, kind: str, place: float) -> None:
        self.counted["damages"] += 1
        path = data.draw(st.sampled_from(self.files()))
        if path.stat().st_size:
            DAMAGES[kind](path, place)
        if path.is_file():
            assert cache.load(path.stem) == [], "it was believed"

    @precondition(lambda self: self.files())
    @rule(data=st.data(), years=st.sampled_from([-30, -1, 1, 30]))
    def age(self, data: st.DataObject, years: int) -> None:
        path = data.draw(st.sampled_from(self.files()))
        when = path.stat().st_mtime + years * 3e7
        os.utime(path, (when, when))

    @rule(which=NETS, sides=SIDES, budget=BUDGETS, call=st.sampled_from(["replace", "fsync", "touch", "write", "open"]))
    def the_disk_refuses(self, which: int, sides: tuple[int, int], budget: int, call: str) -> None:
        self.counted["damages"] += 1

        def full(*_: Any, **__: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        places = {
            "replace": (os, "replace"),
            "touch": (Path, "touch"),
            "fsync": (os, "fsync"),
            "write": (tempfile._TemporaryFileWrapper, "write"),
            "open": (tempfile, "NamedTemporaryFile"),
        }
        holder, name = places[call]
        with mock.patch.object(holder, name, full, create=True):
            self.does(which, sides, budget)

    @rule(kind=st.sampled_from(["a file", "nothing", "a dead link", "a folder of folders"]))
    def the_folder_is(self, kind: str) -> None:
        self.counted["damages"] += 1
        names = [path.name for path in self.files()]
        if self.folder.is_dir() and not self.folder.is_symlink():
            shutil.rmtree(self.folder)
        else:
            self.folder.unlink(missing_ok=True)
        self.cache.mkdir(exist_ok=True)
        if kind == "a file":
            self.folder.write_text("no folder")
        elif kind == "a dead link":
            self.folder.symlink_to(self.root / "nowhere")
        elif kind == "a folder of folders":
            for name in names:
                (self.folder / name).mkdir(parents=True)

    @invariant()
    def the_folder_is_bounded(self) -> None:
        if self.folder.is_dir():
            found = [path.name for path in self.folder.iterdir() if not path.is_dir()]
            assert len([name for name in found if name.endswith(".json")]) <= 4
            assert self.killed or all(name.endswith(".json") for name in found), found


@pytest.mark.slow
def test_the_cache_is_of_use_or_of_none(
    count: Callable[..., int], record_result: Callable[..., None], minutes: float, caplog: pytest.LogCaptureFixture
) -> None:
    found = go_through(Recipes, count(ci=2, full=200), count(ci=6, full=14), minutes)
    record_result("state_machine_recipes", {**found, "defects_found": DEFECTS})


#: What it has found, each with its test.
DEFECTS: list[dict[str, str]] = [
    {
        "what": "A plan that shares halos, made for one image, was an error for a wider one",
        "test": "tests/lightning_plugin/planner/test_recipe.py::test_what_shares_halos_stays_cut_along_one_axis",
    },
    {
        "what": "Planning hooked the modules of all threads",
        "test": (
            "tests/lightning_plugin/test_private.py::test_work_is_counted_without_hooks_on_the_modules_of_other_threads"
        ),
    },
    {
        "what": "A map on the disk could not be opened while another thread opened one",
        "test": "tests/lightning_plugin/test_store.py::test_threads_open_maps_at_the_same_time",
    },
    {
        "what": "Each step on a full disk left a half written file",
        "test": "tests/lightning_plugin/planner/test_cache.py::test_what_cannot_be_written_leaves_nothing",
    },
]
