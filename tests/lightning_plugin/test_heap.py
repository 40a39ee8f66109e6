"""Holes are given back to the system when there are too many, and what cannot be given back is not tried for again."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lightning_plugin import LazyImage, TiledModule, memory
from lightning_plugin.ledger import Ledger, watched
from lightning_plugin.memory import Heap, process_memory

MIB = 2**20


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that holes were given back."""
    found: list[int] = []
    give = memory.malloc_trim()

    def trim(pad: int) -> None:
        found.append(pad)
        if give is not None:
            give(pad)

    monkeypatch.setattr(memory, "malloc_trim", lambda: trim)
    return found


@pytest.mark.slow
@pytest.mark.skipif(memory.malloc_trim() is None, reason="the C library gives nothing back")
def test_holes_are_given_back() -> None:
    """In a process of its own: what earlier tests have left free would be taken first."""
    done = subprocess.run([sys.executable, "-m", "tests.lightning_plugin.holes"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_somebody_elses_is_tried_for_once(times: list[int]) -> None:
    """Memory that no ledger counts is no hole; it counts as the process's own from then on."""
    found = Heap(200 * MIB)
    found.trim(0)
    other = torch.ones(25 * MIB)
    before = len(times)
    found.trim(0)
    found.trim(0)
    assert len(times) == before + 1
    assert found.baseline is not None and found.baseline > 90 * MIB
    del other
    found.trim(0)
    assert len(times) == before + 1 and found.baseline < process_memory() + MIB


@pytest.mark.parametrize("budget", [1, 64 * MIB, 256 * MIB, 2**34])
def test_holes_and_what_is_freed_between_two_looks_are_no_more_than_was_promised(budget: int) -> None:
    found = Heap(budget)
    promised = max(16 * MIB, 0.15 * budget)
    assert promised - 2 <= 2 * found.max_holes <= promised
    found.freed = found.max_holes
    assert not found.is_due
    found.freed += 1
    assert found.is_due


def test_a_ledger_looks_when_much_was_freed() -> None:
    ledger = Ledger()
    ledger.heap = Heap(200 * MIB)
    for _ in range(10):
        tensor = torch.ones(3 * MIB)
        with watched(ledger):
            tensor = tensor + 1
        del tensor
    assert ledger.heap.freed <= ledger.heap.max_holes + 12 * MIB
    assert ledger.heap.baseline is not None


@pytest.mark.parametrize("options", [{"budget": "1GiB"}, {"budget": "1GiB", "trim": False}, {"tiles": 2}])
def test_it_is_done_under_a_budget_unless_it_is_not_wanted(options: dict[str, object]) -> None:
    tiled = TiledModule(torch.nn.Conv2d(3, 2, 3), **options)  # type: ignore[arg-type]
    tiled(LazyImage(torch.rand(1, 3, 32, 32))).sum().backward()
    assert tiled.engine.ledger is not None
    assert (tiled.engine.ledger.heap is not None) == (options == {"budget": "1GiB"})


def test_a_heap_goes_by_the_budget_of_the_step() -> None:
    tiled = TiledModule(torch.nn.Conv2d(3, 2, 3), budget="1GiB")
    x = torch.rand(1, 3, 32, 32)
    tiled(x)
    tiled.engine.planner.options = replace(tiled.engine.options, budget=2 * 2**30)
    tiled(x)
    assert tiled.engine.ledger is not None and tiled.engine.ledger.heap is not None
    assert tiled.engine.ledger.heap.budget == 2 * 2**30


def test_a_module_with_a_heap_is_copied() -> None:
    tiled = TiledModule(torch.nn.Conv2d(3, 2, 3), budget="64MiB", compile="tiles")
    x = torch.rand(1, 3, 32, 32)
    first = tiled(x)
    assert torch.equal(copy.deepcopy(tiled)(x), first)
