"""Run a chain link by link; see [Note: chain] in `chain`.

In forward, links that are not kept run without grad, and the vectors between them are freed, except those that the plan
has slots for. Each link is one function of autograd, which saves neither its inputs nor its outputs. Backward begins
with the last link: its inputs are recomputed from the nearest slot before it, and free slots are filled again on the
way (`stored_links`). Then the link runs once more, with grad, and is pulled back. This holds for any order of backward,
for a pass that ends early, and for a retained graph: inputs are recomputed from the slots that are filled.

Operators that draw by positions have a key, and draw the same again. Masks with one number for each channel, and
dropout on a vector, are drawn by PyTorch: if a link's first run has moved the generators, their state before it is
saved. Each later run of the link begins with that state, and leaves the generators as it found them.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.chain import Body, Chain, stored_links
from lightning_plugin.execute.frame import Frame, Step
from lightning_plugin.execute.function import Inputs, count_results
from lightning_plugin.execute.gradients import live_pairs, pull_back
from lightning_plugin.graph import Bindings, Capture, Node, Value, with_requires_grad
from lightning_plugin.ops import Barrier, VectorOp
from lightning_plugin.plan import ChainPlan
from lightning_plugin.private import first_order, retains_graph, without_view


@dataclass(eq=False)
class RandomStates:
    """States of PyTorch's generators before the first run of each link that draws.

    Attributes:
        may_draw: True if operators of the links may draw.
        devices: CUDA devices of the links.
        states: The states, by the number of the link.
    """

    may_draw: bool
    devices: tuple[torch.device, ...]
    states: dict[int, list[Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(body: Body) -> RandomStates:
        may_draw = any(isinstance(n.op, (VectorOp, Barrier)) for n in body.nodes)
        return RandomStates(may_draw, tuple({v.device for v in body.outputs if v.device.type == "cuda"}))

    @contextmanager
    def record(self, k: int) -> Iterator[None]:
        """Save the state before a block, the first run of a link, if the block draws."""
        before = self.get_state() if self.may_draw else []
        yield
        if any(not torch.equal(a, b) for a, b in zip(before, self.get_state() if self.may_draw else [], strict=True)):
            self.states[k] = before

    @contextmanager
    def restore(self, k: int) -> Iterator[None]:
        """Run a block, another run of a link, with the state of the first, and restore the generators after it."""
        with torch.random.fork_rng(self.devices, enabled=k in self.states):
            if k in self.states:
                self.set_state(self.states[k])
            yield

    def get_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self.devices)]

    def set_state(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        for device, each in zip(self.devices, state[1:], strict=True):
            torch.cuda.set_rng_state(each, device)


@dataclass(eq=False)
class Slots:
    """Stored entries, by the number of the link that reads them.

    Attributes:
        capacity: Number of slots besides the first link's entries, which are always stored.
        stored: The entries.
        places: The numbers of the links, sorted.
    """

    capacity: int
    stored: dict[int, Inputs] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.capacity - len(self.places) + (0 in self.stored)

    def put(self, k: int, entries: Sequence[Tensor]) -> None:
        if k not in self.stored:
            insort(self.places, k)
        self.stored[k] = Inputs.of([t.detach() for t in entries], None)

    def nearest(self, k: int) -> int:
        """Return the last link up to ``k`` whose entries are stored."""
        if not self.places:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the entries that a chain of links has stored were "
                "freed by the first backward. Call that with retain_graph=True."
            )
        return self.places[bisect_right(self.places, k) - 1]

    def get(self, k: int) -> list[Tensor]:
        return self.stored[k].restore()

    def drop(self, k: int) -> None:
        if self.stored.pop(k, None) is not None:
            self.places.remove(k)

    def clear(self) -> None:
        self.stored.clear()
        self.places.clear()


#: Runs the body of a link in a frame, which then holds its outputs.
RunBody = Callable[[Body, Frame], None]
#: The place under which a rehearsal counts the memory of links.
CHAIN = "chain"
#: The first place of a link's segments, beyond those of all other segments.
FIRST_LINK_PLACE = 1 << 20


def run_chain(node: Node, frame: Frame, plan: ChainPlan, run: RunBody) -> None:
    """Run a chain forward, and put its outputs into the frame, with their backward."""
    op = node.op
    assert isinstance(op, Chain)
    rehearses = frame.step.rehearsal is not None
    places = rehearsed_links(op, plan) if rehearses else range(op.count)
    recomputed = op.count - plan.kept
    own = {k: Link.of(op.own(node, k), frame) for k in places}
    slots, untiled = Slots(0 if rehearses else plan.slots), all(s.keep for s in plan.segments)
    links = Links(op, run, frame.step, own, slots, untiled)
    entries = [frame.vector(v) for v in node.inputs[: len(op.body.entries)]]
    links.slots.put(0, entries)
    fill = frozenset(stored_links(recomputed, links.slots.free))
    grad = op.trains and torch.is_grad_enabled()
    skipped = SkippedLinks(op, plan, frame.step) if rehearses else None
    for k in places:
        if k in fill:
            links.slots.put(k, entries)
        if skipped is not None and k >= recomputed:
            skipped.add_kept(entries)
        made = links.run_link(k, entries, grad and k < recomputed)
        entries = made[: len(op.body.exits)]
        frame.vectors.update(zip(op.results(node, k), made[len(entries) :], strict=True))
    frame.vectors.update(zip(node.outputs, entries, strict=False))
    if skipped is not None:
        links.skipped = skipped
        skipped.allocate_kept()
        for k in set(range(op.count)).difference(places):
            frame.vectors.update(zip(op.results(node, k), skipped.results, strict=True))
    if not grad or not recomputed:
        links.slots.clear()


@dataclass(frozen=True, eq=False)
class Link:
    """A link's own vectors, which require grad as they did in forward, and which of them are streamed."""

    own: Inputs
    streamed: Sequence[bool]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The vectors; an error if one of them was changed."""
        return self.own.restore()

    @staticmethod
    def of(values: Sequence[Value], frame: Frame) -> Link:
        streams = frame.streams.captured if frame.streams is not None else {}
        tensors = [with_requires_grad(streams[v], v.requires_grad) if v in streams else frame.vector(v) for v in values]
        return Link(Inputs.of(tensors, None), [v in streams for v in values])


@dataclass(eq=False)
class Links:
    """The links of a chain in one run.

    Autograd's graph refers to this object. Therefore it refers to no results of the run except those in its slots.

    Attributes:
        op: The chain.
        run_body: Runs the body of a link in a frame.
        step: The step.
        links: The own vectors of each link that runs.
        slots: The stored entries.
        is_untiled: True if all segments of a link are kept.
        peaks: Most bytes that a link needed, by direction.
        skipped: The links that a rehearsal leaves out.
        random: States of generators.
    """

    op: Chain
    run_body: RunBody
    step: Step
    links: Mapping[int, Link]
    slots: Slots
    is_untiled: bool
    peaks: dict[str, int] = field(default_factory=dict)
    skipped: SkippedLinks | None = None
    random: RandomStates = field(init=False)

    def __post_init__(self) -> None:
        self.random = RandomStates.of(self.op.body)

    def run_link(self, k: int, entries: Sequence[Tensor], recompute: bool) -> list[Tensor]:
        """Return the outputs of a link, with their backward: with ``recompute`` one that runs the link again and saves
        nothing, else autograd's own."""
        if not recompute:
            keeps = self.op.trains and torch.is_grad_enabled()
            with self.count_memory("kept" if keeps else "forward") as step:
                made = self.compute_outputs(k, entries, self.links[k].tensors, step)
            count_results(self.step.ledger, made)
            return made
        results = LinkFunction.apply(self, k, *entries, *self.links[k].tensors)
        ledger = self.step.ledger
        function = next((t.grad_fn for t in results if t.grad_fn is not None), None)
        if ledger is not None and function is not None and not any(self.links[k].streamed):
            ledger.hook_function(function)
        return list(results)

    def forward(self, k: int, entries: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of a link, without a backward."""
        link = self.links[k]
        own = [t if streamed else t.detach() for t, streamed in zip(link.tensors, link.streamed, strict=True)]
        with torch.no_grad(), self.count_memory("forward") as step:
            made = self.compute_outputs(k, [t.detach() for t in entries], own, step)
        count_results(self.step.ledger, made)
        return made

    def restore_entries(self, k: int) -> list[Tensor]:
        """Return the entries of a link; recompute them, and fill free slots, if they are not stored."""
        at = self.slots.nearest(k)
        entries = self.slots.get(at)
        fill = {at + i for i in stored_links(k - at + 1, self.slots.free)}
        for j in range(at, k):
            if j in fill:
                self.slots.put(j, entries)
            with self.random.restore(j):
                entries = self.forward(j, entries)[: len(self.op.body.exits)]
        return entries

    def pull_back(self, k: int, grads: Sequence[Tensor | None], own: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of a link's inputs."""
        count_results(self.step.ledger, grads)
        body = self.op.body
        with torch.enable_grad():  # views, no leaves: the ledger takes sums of a leaf's gradients for the user's
            entries = [
                t.detach().requires_grad_().view_as(t) if v.requires_grad else t
                for t, v in zip(self.restore_entries(k), body.entries, strict=True)
            ]
        own = [
            t if streamed or not v.requires_grad else t.detach().requires_grad_()
            for v, t, streamed in zip(body.own, own, self.links[k].streamed, strict=True)
        ]
        with torch.enable_grad(), self.count_memory("backward") as step:
            with self.random.restore(k):
                made = self.compute_outputs(k, entries, own, step)
            live = live_pairs(made, grads)
            del made
            found = pull_back(live, [*entries, *own])
        streamed = [*(False for _ in entries), *self.links[k].streamed]  # their gradients are on their tiers
        count_results(self.step.ledger, (g for g, below in zip(found, streamed, strict=True) if not below))
        return found

    def compute_outputs(self, k: int, entries: Sequence[Tensor], own: Sequence[Tensor], step: Step) -> list[Tensor]:
        """Run a link's body on these tensors, and return its outputs."""
        body = self.op.link(k)
        vectors, captures = dict(zip(body.entries, entries, strict=True)), {}
        for v, t, streamed in zip(body.own, own, self.links[k].streamed, strict=True):
            if streamed:
                captures[v] = Capture(t, None)
            else:
                vectors[v] = t
        frame = Frame(Bindings({}, captures), vectors, step)
        self.run_body(body, frame)
        return [without_view(frame.vector(v)) for v in body.outputs]

    # Memory

    @contextmanager
    def count_memory(self, what: str) -> Iterator[Step]:
        """Run a block, a run of a link, with the step that it is given. The ledger watches the first link of each
        direction, and takes the others to need as much. Kept links are always watched. A link without tiles is reported
        as one tile."""
        ledger = self.step.ledger
        if (rehearsal := self.step.rehearsal) is not None:
            with rehearsal.turn((CHAIN, "backward" if what == "backward" else "forward")):
                yield self.step
            return
        if ledger is None or ledger.watch_all or what == "kept":
            yield self.step
        elif what in self.peaks:
            ledger.add_unwatched(self.peaks[what])
            yield replace(self.step, ledger=None)
        else:
            with ledger.measure() as peak:
                yield self.step
            self.peaks[what] = peak.bytes
        if self.is_untiled:
            self.step.report_tiles(1)


class LinkFunction(torch.autograd.Function):
    """A link that is recomputed in backward."""

    @staticmethod
    def forward(ctx: Any, links: Links, k: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.links, ctx.k = links, k
        first = len(links.op.body.entries)
        with links.random.record(k):
            made = links.forward(k, inputs[:first])
        ctx.save_for_backward(*inputs[first:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for t, v in zip(made, links.op.body.outputs, strict=True) if not v.requires_grad)
        )
        return tuple(made)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        links, k = ctx.links, ctx.k
        found = links.pull_back(k, grads, ctx.saved_tensors)
        if not retains_graph():
            links.slots.drop(k)
            if links.skipped is not None and not k:
                links.skipped.stored = None
        return None, None, *found


def rehearsed_links(op: Chain, plan: ChainPlan) -> list[int]:
    """Return the links that a rehearsal runs: two of those that are recomputed, and two of those that are kept. The
    second runs beside the maps and gradients of the first."""
    recomputed = op.count - plan.kept
    return [*range(min(2, recomputed)), *range(max(recomputed, op.count - 2), op.count)]


def rehearsed_vectors(node: Node, plan: ChainPlan) -> set[Value]:
    """Return the own vectors of the links that a rehearsal runs."""
    op = node.op
    assert isinstance(op, Chain)
    return {v for k in rehearsed_links(op, plan) for v in op.own(node, k)}


def skipped_vectors(node: Node, plan: ChainPlan) -> set[Value]:
    """Return the own vectors of the links that a rehearsal leaves out."""
    op = node.op
    assert isinstance(op, Chain)
    return set(node.inputs[len(op.body.entries) :]) - rehearsed_vectors(node, plan)


class SkippedLinks:
    """Memory in place of the links that a rehearsal leaves out, of the size that they hold until their backward.

    Attributes:
        live: Bytes live at the start of each kept link that ran.
        stored: In place of stored entries.
        kept: In place of the tensors that kept links save for backward.
        results: Results of one link, for each that is left out.
        other_results: In place of the results of the others.
    """

    def __init__(self, op: Chain, plan: ChainPlan, step: Step) -> None:
        self.op, self.plan = op, plan
        ledger = step.ledger
        assert ledger is not None
        self.ledger = ledger
        self.live: list[int] = []
        recomputed = op.count - plan.kept
        self.stored = self.allocate(min(plan.slots, max(0, recomputed - 1)) * op.body.entry_bytes)
        self.kept: Tensor | None = None
        self.results = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in op.body.results]
        run = len(rehearsed_links(op, plan))
        self.other_results = self.allocate((op.count - run) * sum(v.bytes for v in op.body.results))

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.op.body.outputs[0].device)

    def add_kept(self, entries: Sequence[Tensor]) -> None:
        """Note the live bytes before a kept link."""
        if not self.live:
            for t in entries:
                if t.requires_grad:
                    t.register_hook(self.free_kept)
        self.live.append(self.ledger.live)

    def allocate_kept(self) -> None:
        """Allocate as much for each kept link that is left out as the last kept link holds."""
        if self.live and self.plan.kept > len(self.live):
            each = self.ledger.live - self.live[-1]
            self.kept = self.allocate((self.plan.kept - len(self.live)) * each)

    def free_kept(self, gradient: Tensor) -> None:
        """Free the memory of kept links after their backward."""
        self.kept = None
