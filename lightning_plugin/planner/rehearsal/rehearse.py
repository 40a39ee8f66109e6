"""Rehearsal: the exact memory of a plan, found by running it, forward and backward, on tensors without data.

The executor itself runs under a ledger, so the ledger sees the memory of a real step. Of each tile grid only the tiles
that can be the worst are run: the first, after which gradients are there to be added to, and the largest. Of a scan all
are run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.boxes import Box, Grid
from lightning_plugin.errors import PlanError
from lightning_plugin.execute.chain import rehearsed_vectors, skipped_vectors
from lightning_plugin.execute.frame import Frame, Rehearsal, Step
from lightning_plugin.execute.run import run_plan
from lightning_plugin.fakes import MODES
from lightning_plugin.graph import Bindings, Capture, Image, Node, Value
from lightning_plugin.layout import Layout
from lightning_plugin.ledger import Ledger
from lightning_plugin.plan import Plan
from lightning_plugin.planner.analysis.network import Network
from lightning_plugin.planner.overhead import without_gc
from lightning_plugin.planner.rehearsal.representative import count_heaviest, representative
from lightning_plugin.private import data_dependent, identity_hook, needs_data
from lightning_plugin.program.program import Program
from lightning_plugin.residency.disk import DiskFile
from lightning_plugin.residency.transfer import Lend, Transfer
from lightning_plugin.source import TensorSource, TileSource, together


class FakeDiskFile(DiskFile):
    """A map on the disk without a file."""

    def open(self, size: int, folder: str | None) -> None:
        return


class FakeHostMap:
    """A map in the memory of another device: a tile that is read is a copy."""

    numbered = None

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.dtype = dtype
        self.device = device

    def prepare_write(self, box: Box, tile: Tensor, lend: Lend) -> Transfer:
        return Transfer([tile.to(self.dtype)], nothing)

    def prepare_add(self, box: Box, tile: Tensor, lend: Lend) -> Transfer:
        return Transfer([tile], nothing)

    def prepare_read(self, box: Box, lend: Lend) -> Transfer:
        held = [torch.empty(self.layout.tile_shape(box), dtype=self.dtype, device=self.device)]
        return Transfer(held, nothing, lambda: held[0])


def nothing() -> None:
    """The work of a transfer in a rehearsal."""


class FakeSource(TileSource):
    """An image of a given shape that is only read, without pixels."""

    instances: int

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, image: Image) -> None:
        self.shape, self.dtype, self.instances = shape, dtype, image.instances
        self.together, self.reads_ahead = together(image.source), image.source.reads_ahead
        self._ahead: dict[Box, Tensor] = {}

    def prefetch(self, boxes: Iterable[Box]) -> None:
        if self.reads_ahead:
            self._ahead |= {box: self._made(box) for box in boxes}

    def read(self, box: Box) -> Tensor:
        return self._ahead.pop(box) if box in self._ahead else self._made(box)

    def _made(self, box: Box) -> Tensor:
        lead, space = self.instances, box.extent[self.instances :]
        if not self.together:
            return torch.empty((*box.extent[:lead], self.shape[lead], *space), dtype=self.dtype)
        pixels = torch.empty((*self.shape[: lead + 1], *space), dtype=self.dtype)
        return pixels[tuple(slice(lo, hi) for lo, hi in [*box.intervals()][:lead])]


@dataclass(eq=False)
class Turn:
    """The memory of a segment's forward or backward while it ran.

    Attributes:
        began: Bytes that were live when it began.
        released: Bytes of autograd's graph that were freed since.
        peak: The most bytes that were live.
        needs: The most bytes beyond those that were live when it began.
        retained: The same if nothing of autograd's graph had been freed, as under ``retain_graph=True``.
    """

    began: int = 0
    released: int = 0
    peak: int = 0
    needs: int = 0
    retained: int = 0

    def see(self, live: int) -> None:
        self.peak = max(self.peak, live)
        self.needs = max(self.needs, live - self.began)
        self.retained = max(self.retained, live - self.began + self.released)


class RehearsalLedger(Ledger):
    """The ledger of a rehearsal, which counts fake tensors, and the memory of each segment's forward and backward.

    Attributes:
        turns: The turns, by the place of a segment and "forward" or "backward".
        now: The turn under way.
        left: Bytes that forward leaves when backward begins.
    """

    def __init__(self, device: torch.device | None) -> None:
        super().__init__(device, fakes=True)
        self.turns: dict[Any, Turn] = {}
        self.now = Turn()
        self.left = 0
        self._began = 0
        self._graph: set[int] = set()

    def begin(self) -> None:
        super().begin()
        self._began = self.live

    def count(self, tensor: Tensor) -> None:
        super().count(tensor)
        self.now.see(self.live)

    def add_unwatched(self, size: int) -> None:
        super().add_unwatched(size)
        self.now.see(self.live + size)

    def begin_turn(self, who: Any, goes_on: bool = False) -> None:
        self.now = Turn() if who is None else self.turns.setdefault(who, Turn(self.live))
        if not goes_on:
            self.now.began, self.now.released = self.live, 0
        self.now.see(self.live)

    @contextmanager
    def turn(self, who: Any) -> Iterator[None]:
        former = self.now
        self.begin_turn(who)
        try:
            yield
        finally:
            self.now = former
            self.now.see(self.live)

    def graph_is_made(self) -> None:
        """Mark all live memory as held by autograd's graph, which may be asked to retain it."""
        self._graph = set(self._refs)
        self.left = self.live - self._began

    def _forget(self, key: int, _: Any = None) -> None:
        if key in self._graph:
            self._graph.discard(key)
            self.now.released += self._refs[key][1]
        super()._forget(key)


@dataclass(frozen=True)
class RehearsedMemory:
    """The memory that a rehearsal found.

    Attributes:
        peak: The peak of the step.
        held: Bytes that forward leaves when backward begins.
        turns: The memory of each segment's forward and backward, by its place and "forward" or "backward".
    """

    peak: int
    held: int
    turns: Mapping[Any, Turn]

    def turn(self, place: int, direction: str) -> Turn:
        """A segment's turn; an empty one where it has none."""
        return self.turns.get((place, direction), Turn())


def rehearse(plan: Plan, network: Network) -> RehearsedMemory:
    """The memory of a plan, found by running it on fake tensors under a ledger.

    Raises:
        PlanError: The memory of an operator depends on data.
    """
    try:
        network.profiles  # noqa: B018  found before the ledger looks on
        return run_on_fakes(plan, network)
    except RuntimeError as error:
        if not needs_data(error):
            raise
        raise PlanError(
            f"a plan is made without data, and {data_dependent(error)}, or an operator in its backward, takes memory "
            "that depends on the data: give tiles=(...) in place of a budget, compute that part on materialize(x), a "
            "map that is held whole, or write it with torch.where."
        ) from error


def run_on_fakes(plan: Plan, network: Network) -> RehearsedMemory:
    """Run a plan, forward and backward, on fake tensors."""
    ledger = RehearsalLedger(device_of(network))

    def tiles(program: Program, grid: Grid, ahead: bool) -> Iterable[tuple[Box, ...]]:
        return network.repeats.once(
            program, ("tiles", grid, ahead), lambda: list(representative(program, grid, count_heaviest(network), ahead))
        )

    def away(layout: Layout, dtype: torch.dtype, device: torch.device, tier: str) -> Any:
        return FakeHostMap(layout, dtype, device) if tier == "host" else FakeDiskFile(layout, dtype, device)

    step = Step(ledger, rehearsal=Rehearsal(tiles, away, ledger.begin_turn, ledger.turn), library=network.library)
    # A step may be planned while the user's code has hooks on saved tensors, as in `torch.utils.checkpoint`.
    own = torch.autograd.graph.saved_tensors_hooks(identity_hook, identity_hook)
    with without_gc(), torch.inference_mode(False), MODES.planning, own:
        frame = fake_frame(plan, network, step)
        given = list(frame.vectors.values())  # a step's parameters stay when its results go
        with ledger.watcher:
            ledger.begin()
            with torch.set_grad_enabled(network.trains):
                run_plan(plan, network.recording, frame)
            results = results_of(network.nodes, frame)
            del frame
            ledger.graph_is_made()
            if network.trains:
                with torch.autograd.set_multithreading_enabled(False):  # this thread's modes and ledger go with it
                    backward(results)
            found = RehearsedMemory(ledger.peak, ledger.left + network.computed_bytes, ledger.turns)
        del given
    return found


def device_of(network: Network) -> torch.device | None:
    """The device that a network runs on: its image's, or that of what it makes first."""
    images = network.recording.images
    made = (v.device for n in network.nodes for v in n.outputs)
    return images[0].device if images else next(made, None)


def results_of(nodes: Sequence[Node], frame: Frame) -> list[Tensor]:
    """Results that backward begins with: no other node with a gradient reads them.

    A result that is read without gradient, as a pooled vector by running statistics, may still lead to a loss.
    """

    def differentiable(v: Value) -> bool:
        found = frame.vectors.get(v)  # what was there for a use only is no result
        return found is not None and found.grad_fn is not None

    read = {v for n in nodes if any(o.is_map or differentiable(o) for o in n.outputs) for v in n.inputs}
    return [frame.vector(v) for n in nodes for v in n.outputs if v not in read and differentiable(v)]


def backward(results: Sequence[Tensor]) -> None:
    """Pull back a cotangent for each result."""
    if results:
        cotangents = [torch.empty_like(r) for r in results]
        torch.autograd.backward(results, cotangents)


def fake_frame(plan: Plan, network: Network, step: Step) -> Frame:
    """A frame whose images and vectors hold no data. Tensors that live below the device are not counted."""
    recording, ledger = network.recording, step.ledger
    assert ledger is not None
    known: dict[Value, Tensor] = {}
    captures: dict[Value, Capture] = {}
    below = {network.nodes[place].outputs[0] for place in (*plan.on_host, *plan.on_disk)}
    left_out = without_links(plan, network)
    for v in below - left_out:
        captures[v] = Capture(fake_below(v, ledger), None)
    ledger.live += network.unrecorded_bytes
    ledger.live += sum(network.optimizer_bytes(v) for v in network.captured if v not in below)
    for v in left_out - below:
        ledger.live += v.bytes * (2 if v.requires_grad else 1)
    for v in dict.fromkeys(v for n in recording.nodes for v in (*n.inputs, *n.outputs)):
        if v not in below and v not in left_out and (v in recording.known or v in recording.bindings.captures):
            known[v] = fake_like(v)
            ledger.count(known[v])
            if v not in recording.known and network.has_gradient(v):
                gradient = torch.empty_like(known[v])
                ledger.count(gradient)
                known[v].grad = gradient
    images = {}
    for v in (v for n in recording.nodes for v in (*n.inputs, *n.outputs)):
        if v in recording.bindings.images and v not in images:
            images[v] = fake_image(v, recording.bindings.images[v], ledger)
    return Frame(Bindings(images, captures), known, step)


def without_links(plan: Plan, network: Network) -> set[Value]:
    """Vectors that only links read and that a rehearsal leaves out. They are counted, with their gradients."""
    found: set[Value] = set()
    places = {chain.node for chain in plan.chains}
    used = {v for i, n in enumerate(network.nodes) if i not in places for v in n.inputs}
    for chain in plan.chains:
        found |= skipped_vectors(network.nodes[chain.node], chain)
        used |= rehearsed_vectors(network.nodes[chain.node], chain)
    return (found - used) & network.recording.bindings.captures.keys()


def fake_image(v: Value, image: Image, ledger: Ledger) -> Image:
    """An image without pixels: a tensor if it lies in one, else a source that is only read."""
    if image.tensor is None:
        return Image.of(FakeSource(v.shape, v.dtype, image), image.device)
    here = image.on_device is not None
    tensor = fake_like(v) if here else torch.empty(v.shape, dtype=v.dtype, device=image.tensor.device)
    ledger.ignore(tensor)
    return Image.of(TensorSource(tensor, image.instances), image.device)


def fake_below(v: Value, ledger: Ledger) -> Tensor:
    """A fake tensor for one that lives below the device, with its gradient there."""
    tensor = fake_like(v)
    ledger.ignore(tensor)
    if v.requires_grad:
        tensor.grad = torch.empty_like(tensor)
        ledger.ignore(tensor.grad)
    return tensor


def fake_like(v: Value) -> Tensor:
    """A fake tensor like a value's, with grad if the value has it."""
    tensor = torch.empty_strided(v.shape, v.fake.stride(), dtype=v.dtype, device=v.device)
    return tensor.requires_grad_() if v.requires_grad else tensor
