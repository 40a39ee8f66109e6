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
from lightning_plugin.ledger import Ledger, Note
from lightning_plugin.ops import Captured, Source
from lightning_plugin.plan import Plan
from lightning_plugin.planner.account import Account, account
from lightning_plugin.planner.network import Network
from lightning_plugin.planner.representative import effort, representative
from lightning_plugin.program.program import Program
from lightning_plugin.source import TensorSource, prefetches, version_of


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
    """What a plan holds."""
    return account(noted(plan, network))


def noted(plan: Plan, network: Network) -> list[Note]:
    """Run a plan on fake tensors, and give what its ledger notes."""
    network.profiles  # noqa: B018  found before the ledger looks on
    nodes = network.nodes
    images = [n for n in nodes if isinstance(n.op, Source)]
    ledger = Ledger(images[0].outputs[0].device if images else None, fakes=True)

    def tiles(program: Program, grid: Grid, ahead: bool) -> Iterable[Sequence[Box]]:
        return representative(program, grid, effort(network), ahead)

    def away(layout: Layout, dtype: torch.dtype, device: torch.device, tier: str) -> Any:
        return Unfiled(layout, dtype, device) if tier == "disk" else Elsewhere(layout, dtype, device)

    rehearsal = REHEARSAL.set(Rehearsal(tiles, away, network.likeness, network.rehearsed))
    try:
        with torch.inference_mode(False), MODES.planning, dressed(network, ledger), ledger.watcher:
            ledger.notes = []
            ledger.begin()
            with torch.set_grad_enabled(network.trains):
                run_plan(plan, nodes, ledger)
            results = left(nodes)
            ledger.graph_is_made()
            if network.trains:
                with torch.autograd.set_multithreading_enabled(False):  # this thread's modes and ledger go with it
                    backward(results)
            notes, ledger.notes = ledger.notes, None
    finally:
        REHEARSAL.reset(rehearsal)
    return notes


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
