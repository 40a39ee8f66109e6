"""The exact memory of a plan: run it, forward and backward, on tensors without data, under a ledger.

It is the executor that runs, so what the ledger sees is what a real step holds. Of each tile grid only the tiles that
can be the worst are run: the first, after which gradients are there to be added to, and the largest. Of a scan all are
run. Everything that is bound to values while the rehearsal lasts is put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.execute.disk import DiskFile
from lightning_plugin.execute.pool import Lender
from lightning_plugin.execute.rehearsal import REHEARSAL, Rehearsal
from lightning_plugin.execute.run import run_plan
from lightning_plugin.execute.transfer import Transfer
from lightning_plugin.fakes import MODES
from lightning_plugin.graph import Node, Value
from lightning_plugin.layout import Layout
from lightning_plugin.ledger import Ledger
from lightning_plugin.ops import Captured, Source
from lightning_plugin.plan import Plan
from lightning_plugin.planner.network import Network
from lightning_plugin.planner.peak import is_padded, tile_bytes
from lightning_plugin.planner.tiles import samples, with_neighbours
from lightning_plugin.program.program import Program
from lightning_plugin.source import TensorSource, prefetches, version_of

#: About how many operators are run for each grid of a network, tiles together: a small network can afford more tiles.
EFFORT = 240
#: But not more than so many tiles beside the first: with nine, none of 29 plans was found to hold more.
MOST_TILES = 4


@dataclass(frozen=True)
class Account:
    """What a rehearsal found: the peak of the step, of each segment's forward and backward, and what each backward
    needs beyond what is held when it begins, also if the graph is retained; ``held`` is what is left of forward when
    backward begins."""

    peak: int
    held: int
    forward: dict[int, int]
    backward: dict[int, int]
    needs: dict[int, int]
    retained: dict[int, int]


class Unfiled(DiskFile):
    """A map on the disk without the disk."""

    def make(self, size: int, folder: str | None) -> None:
        return


class Elsewhere:
    """A map in the memory of another device: a tile that is read is a copy."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.dtype = dtype
        self.device = device

    def sending(self, box: Box, tile: Tensor, lender: Lender) -> Transfer:
        return Transfer([tile.to(self.dtype)], nothing)

    def adding(self, box: Box, tile: Tensor, lender: Lender) -> Transfer:
        return Transfer([tile], nothing)

    def fetching(self, box: Box, lender: Lender) -> Transfer:
        held = [torch.empty(self.layout.tile_shape(box), dtype=self.dtype, device=self.device)]
        return Transfer(held, nothing, lambda: held[0])


def nothing() -> None:
    """The work of a transfer that is only rehearsed."""


@dataclass(frozen=True)
class Scenery:
    """An image that is read and has no pixels."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box) -> Tensor:
        return torch.empty((*self.shape[:2], *box.extent), dtype=self.dtype)

    def constant(self, box: Box) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Announced(Scenery):
    """The same of a source that reads boxes before they are asked for."""

    ahead: dict[Box, Tensor] = field(default_factory=dict)

    def prefetch(self, boxes: Iterable[Box]) -> None:
        for box in boxes:
            self.ahead[box] = super().read(box)

    def read(self, box: Box) -> Tensor:
        return self.ahead.pop(box) if box in self.ahead else super().read(box)


def rehearse(plan: Plan, network: Network) -> Account:
    """Run a plan on fake tensors."""
    network.profiles  # noqa: B018  found before the ledger looks on
    nodes = network.nodes
    images = [n for n in nodes if isinstance(n.op, Source)]
    ledger = Ledger(images[0].outputs[0].device if images else None, fakes=True)

    def tiles(program: Program, grid: Grid, ahead: bool) -> Iterable[Sequence[Box]]:
        return representative(program, grid, min(MOST_TILES, max(1, EFFORT // len(network.order))), ahead)

    def away(layout: Layout, dtype: torch.dtype, device: torch.device, tier: str) -> Any:
        return Unfiled(layout, dtype, device) if tier == "disk" else Elsewhere(layout, dtype, device)

    rehearsal = REHEARSAL.set(Rehearsal(tiles, away, network.likeness, network.rehearsed))
    try:
        with torch.inference_mode(False), MODES.planning, dressed(network, ledger), ledger.watcher:
            ledger.begin()
            before = ledger.live
            with torch.set_grad_enabled(network.trains):
                run_plan(plan, nodes, ledger)
            results = left(nodes)
            held = ledger.live - before
            ledger.graph_is_made()
            if network.trains:
                with torch.autograd.set_multithreading_enabled(False):  # this thread's modes and ledger go with it
                    backward(results)
    finally:
        REHEARSAL.reset(rehearsal)
    forward = {who[0]: m for who, m in ledger.moments.items() if who[1] == "forward"}
    pulled = {who[0]: m for who, m in ledger.moments.items() if who[1] == "backward"}
    return Account(
        ledger.peak,
        held,
        {place: m.peak for place, m in forward.items()},
        {place: m.peak for place, m in pulled.items()},
        {place: m.needs for place, m in pulled.items()},
        {place: m.retained for place, m in pulled.items()},
    )


def left(nodes: Sequence[Node]) -> list[Tensor]:
    """The results that no other node reads on to a loss; nothing else of the rehearsal is held any longer.

    Being read without gradient, as running statistics read a pooled vector, does not keep a loss from coming later.
    """
    read = {id(v) for n in nodes if any(o.is_map or differentiable(o) for o in n.outputs) for v in n.inputs}
    results: list[Any] = [v.real for n in nodes for v in n.outputs if id(v) not in read and differentiable(v)]
    for n in nodes:  # let go of what only the values of this rehearsal hold, as a step does
        for v in n.outputs:
            if not isinstance(n.op, Captured):
                v.real = None
    return results


def backward(results: Sequence[Tensor]) -> None:
    """Pull back a cotangent for each result."""
    if results:
        cotangents = [torch.empty_like(r) for r in results]
        torch.autograd.backward(results, cotangents)


def differentiable(vector: Value) -> bool:
    """Whether a computed vector leads back to something that wants a gradient."""
    return not vector.is_map and vector.real is not None and vector.real.grad_fn is not None


def representative(program: Program, grid: Grid, worst: int, ahead: bool) -> Iterator[Sequence[Box]]:
    """The first tile, and the ``worst`` of those that stand for all: the ones whose maps are largest together, copies
    that are padded at borders included. Of those that hold and pad the same, one; where transfers go ahead, in the
    order of the grid and between the tiles before and after each, whose transfers it meets."""
    extents = [t.map.space.extent for t in program.targets]
    maps = {id(v): v for n in program.steps for v in (*n.maps, *n.outputs) if v.is_map}
    found: dict[tuple[object, ...], tuple[int, tuple[int, ...], tuple[Box, ...]]] = {}
    (start, first), *rest = samples(grid, extents)
    for index, owned in rest:
        need = program.boxes(owned)
        sizes = [(key, box.extent) for key, box in need.items() if key in maps]
        pads = [padding(node, need) for node in program.steps]
        weight = sum(tile_bytes(maps[key], need[key]) for key, _ in sizes) + sum(pads)
        found.setdefault((*sizes, *pads), (weight, index, owned))
    heaviest = sorted(found.values(), key=lambda c: c[0], reverse=True)[:worst]
    if ahead:
        yield from with_neighbours(grid, extents, [start, *(index for _, index, _ in heaviest)])
        return
    yield first
    for _, _, owned in heaviest:
        yield owned


def padding(node: Node, need: dict[int, Box]) -> int:
    """The copy of its input that a window operator pads by hand."""
    box = need.get(id(node.outputs[0]))
    return tile_bytes(node.maps[0], need[id(node.maps[0])]) if box is not None and is_padded(node, box) else 0


@contextmanager
def dressed(network: Network, ledger: Ledger) -> Iterator[None]:
    """Values and images bound to fake tensors, and everything as before afterwards."""
    nodes = network.nodes
    values = {id(v): v for n in nodes for v in (*n.inputs, *n.outputs)}
    reals = {k: v.real for k, v in values.items()}
    ops = [(n, n.op) for n in nodes]
    try:
        for n in nodes:
            if isinstance(n.op, Captured):
                n.outputs[0].real = leaf(n.outputs[0])
                ledger.see(n.outputs[0].real)
                if network.has_gradient(n):
                    n.outputs[0].real.grad = torch.empty_like(n.outputs[0].real)
                    ledger.see(n.outputs[0].real.grad)
            elif isinstance(n.op, Source):
                image = scenery(n, ledger)
                n.op = Source(image, n.op.device, version_of(image))
        for k, v in values.items():
            if reals[k] is not None and v.real is reals[k]:
                v.real = leaf(v)
                ledger.see(v.real)
        yield
    finally:
        for n, op in ops:
            n.op = op
        for k, v in values.items():
            v.real = reals[k]
            v.handle = v.token = None


def scenery(node: Node, ledger: Ledger) -> Any:
    """What stands for an image: a tensor where it lies on the device, else something that is only read."""
    assert isinstance(node.op, Source)
    image, v = node.op.image, node.outputs[0]
    if isinstance(image, TensorSource):
        tensor = (
            leaf(v) if node.op.here is not None else torch.empty(v.shape, dtype=v.dtype, device=image.tensor.device)
        )
        ledger.ignore(tensor)
        return TensorSource(tensor)
    return (Announced if prefetches(image) else Scenery)(v.shape, v.dtype)


def leaf(v: Value) -> Tensor:
    """A fake tensor like a value's, with grad if the value has it."""
    tensor = torch.empty_strided(v.shape, v.fake.stride(), dtype=v.dtype, device=v.device)
    return tensor.requires_grad_() if v.requires_grad else tensor
