"""A chain, run link by link; see [Note: chain] in `chain`.

Forward, the links that are not kept run without grad, and what goes between them is let go, but for what the plan has
slots for. Each is one function of autograd's, which keeps neither what it reads nor what it makes. Backward comes to
the last first: what that reads is made again from the nearest slot before it, and on the way the slots that have become
free are filled anew (`stored`). Then the link runs once more, with grad, and is pulled back. Whatever the order of
backward, also where a pass ends early or retains the graph: what a link reads is made from what is there.

Operators that draw by positions have a key, and need nothing. But masks of one number for each channel, or dropout on a
vector, are drawn by PyTorch: the state of the generators before a link's first run is kept if the run has moved it.
Whenever the link runs again, it begins from there, and leaves the generators as they were.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.chain import Body, Chain, stored
from lightning_plugin.execute.frame import Frame, Step
from lightning_plugin.execute.function import Inputs, seen
from lightning_plugin.graph import Bindings, Capture, Node, Value, with_requires_grad
from lightning_plugin.ops import Barrier, VectorOp
from lightning_plugin.plan import ChainPlan
from lightning_plugin.private import first_order, retains_graph, without_view


@dataclass(eq=False)
class RandomStates:
    """The states that generators had before the links that have drawn; ``devices`` are those beside the CPU's."""

    looks: bool
    devices: tuple[torch.device, ...]
    states: dict[int, list[Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(body: Body) -> RandomStates:
        """Nothing is looked at where nothing can draw."""
        looks = any(isinstance(n.op, (VectorOp, Barrier)) for n in body.nodes)
        return RandomStates(looks, tuple({v.device for v in body.made if v.device.type == "cuda"}))

    @contextmanager
    def noted(self, k: int) -> Iterator[None]:
        """A block in which a link runs for the first time."""
        before = self.state() if self.looks else []
        yield
        if any(not torch.equal(a, b) for a, b in zip(before, self.state() if self.looks else [], strict=True)):
            self.states[k] = before

    @contextmanager
    def restored(self, k: int) -> Iterator[None]:
        """A block in which it runs again."""
        with torch.random.fork_rng(self.devices, enabled=k in self.states):
            if k in self.states:
                self.set(self.states[k])
            yield

    def state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self.devices)]

    def set(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        for device, each in zip(self.devices, state[1:], strict=True):
            torch.cuda.set_rng_state(each, device)


@dataclass(eq=False)
class Slots:
    """The entries that are stored, by the number of the link that reads them. Those of the first always are; beside
    them there is room for so many."""

    room: int
    stored: dict[int, Inputs] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.room - len(self.places) + (0 in self.stored)

    def put(self, k: int, entries: Sequence[Tensor]) -> None:
        if k not in self.stored:
            insort(self.places, k)
        self.stored[k] = Inputs.of([t.detach() for t in entries], None)

    def nearest(self, k: int) -> int:
        """The last link, no later than this one, whose entries are stored."""
        if not self.places:
            raise RuntimeError(
                "Trying to backward through the graph a second time: what a chain of links has stored went with the "
                "first. Pull back with retain_graph=True before."
            )
        return self.places[bisect_right(self.places, k) - 1]

    def get(self, k: int) -> list[Tensor]:
        return self.stored[k].tensors()

    def drop(self, k: int) -> None:
        if self.stored.pop(k, None) is not None:
            self.places.remove(k)

    def clear(self) -> None:
        self.stored.clear()
        self.places.clear()


#: Runs the body of a link in a frame, and leaves there what it makes.
RunBody = Callable[[Body, Frame], None]
#: Whose turn it is, to the ledger of a rehearsal, while links run.
TURN = "chain"
#: The segments of links have places from here on, so that no other segment has them.
IN_CHAINS = 1 << 20


def run_chain(node: Node, frame: Frame, plan: ChainPlan, run: RunBody) -> None:
    """Run a chain forward; leaves in the frame what it makes, with the way back behind it."""
    op = node.op
    assert isinstance(op, Chain)
    rehearses = frame.step.rehearsal is not None
    places = rehearsed(op, plan) if rehearses else range(op.count)
    recomputed = op.count - plan.kept
    of = {k: Link.of(op.own(node, k), frame) for k in places}
    slots, whole = Slots(0 if rehearses else plan.slots), all(s.keep for s in plan.segments)
    links = Links(op, run, frame.step, of, slots, whole)
    entries = [frame.vector(v) for v in node.inputs[: len(op.body.entries)]]
    links.slots.put(0, entries)
    fill = frozenset(stored(recomputed, links.slots.free))
    grad = op.trains and torch.is_grad_enabled()
    held = Held(op, plan, frame.step) if rehearses else None
    for k in places:
        if k in fill:
            links.slots.put(k, entries)
        if held is not None and k >= recomputed:
            held.keep(k, entries)
        made = links.through(k, entries, grad and k < recomputed)
        entries = made[: len(op.body.exits)]
        frame.vectors.update(zip(op.results(node, k), made[len(entries) :], strict=True))
    frame.vectors.update(zip(node.outputs, entries, strict=False))
    if held is not None:
        links.held = held
        held.rest(entries)
        for k in set(range(op.count)).difference(places):
            frame.vectors.update(zip(op.results(node, k), held.results, strict=True))
    if not grad or not recomputed:
        links.slots.clear()


@dataclass(frozen=True, eq=False)
class Link:
    """A link's own vectors, requiring grad as they did, and which of them are streamed."""

    own: Inputs
    streamed: Sequence[bool]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The vectors; refuses to go on where one of them was changed."""
        return self.own.tensors()

    @staticmethod
    def of(values: Sequence[Value], frame: Frame) -> Link:
        streams = frame.streams.captured if frame.streams is not None else {}
        tensors = [with_requires_grad(streams[v], v.requires_grad) if v in streams else frame.vector(v) for v in values]
        return Link(Inputs.of(tensors, None), [v in streams for v in values])


@dataclass(eq=False)
class Links:
    """The links of a chain in one run. It leads to nothing that the run has made but what its slots hold, since
    autograd's graph leads to it."""

    op: Chain
    run: RunBody
    step: Step
    of: Mapping[int, Link]
    slots: Slots
    #: True if links have no tiles.
    whole: bool
    #: The most bytes that links have needed, of each direction.
    needs: dict[str, int] = field(default_factory=dict)
    held: Held | None = None
    random: RandomStates = field(init=False)

    def __post_init__(self) -> None:
        self.random = RandomStates.of(self.op.body)

    def through(self, k: int, entries: Sequence[Tensor], recompute: bool) -> list[Tensor]:
        """Results of a link, with their backward. With ``recompute`` it will run again, and holds nothing till then."""
        if not recompute:
            keeps = self.op.trains and torch.is_grad_enabled()
            with self.counted(k, "kept" if keeps else "forward") as step:
                made = self.made(k, entries, self.of[k].tensors, step)
            seen(self.step.ledger, made)
            return made
        results = LinkFunction.apply(self, k, *entries, *self.of[k].tensors)
        ledger = self.step.ledger
        function = next((t.grad_fn for t in results if t.grad_fn is not None), None)
        if ledger is not None and function is not None and not any(self.of[k].streamed):
            ledger.hook_function(function)
        return list(results)

    def forward(self, k: int, entries: Sequence[Tensor]) -> list[Tensor]:
        """Results of a link, without a backward."""
        link = self.of[k]
        own = [t if streamed else t.detach() for t, streamed in zip(link.tensors, link.streamed, strict=True)]
        with torch.no_grad(), self.counted(k, "forward") as step:
            made = self.made(k, [t.detach() for t in entries], own, step)
        seen(self.step.ledger, made)
        return made

    def entries(self, k: int) -> list[Tensor]:
        """Entries of a link, recomputed where they are not stored."""
        at = self.slots.nearest(k)
        entries = self.slots.get(at)
        fill = {at + i for i in stored(k - at + 1, self.slots.free)}
        for j in range(at, k):
            if j in fill:
                self.slots.put(j, entries)
            with self.random.restored(j):
                entries = self.forward(j, entries)[: len(self.op.body.exits)]
        return entries

    def pulled(self, k: int, grads: Sequence[Tensor | None], own: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of what a link reads."""
        seen(self.step.ledger, grads)
        body = self.op.body
        with torch.enable_grad():  # no leaves: what is added up for a leaf the ledger takes for the user's
            entries = [
                t.detach().requires_grad_().view_as(t) if v.requires_grad else t
                for t, v in zip(self.entries(k), body.entries, strict=True)
            ]
        own = [
            t if streamed or not v.requires_grad else t.detach().requires_grad_()
            for v, t, streamed in zip(body.own, own, self.of[k].streamed, strict=True)
        ]
        with torch.enable_grad(), self.counted(k, "backward") as step:
            with self.random.restored(k):
                made = self.made(k, entries, own, step)
            live = [(t, g) for t, g in zip(made, grads, strict=True) if g is not None and t.requires_grad]
            del made
            given = [*entries, *own]
            wanted = [t for t in given if t.requires_grad]
            found = self.gradients(live, wanted)
        rest = iter(found)
        grads = [next(rest) if t.requires_grad else None for t in given]
        below = [*(False for _ in entries), *self.of[k].streamed]  # their gradients are there already
        seen(self.step.ledger, (g for g, away in zip(grads, below, strict=True) if not away))
        return grads

    def gradients(self, live: list[tuple[Tensor, Tensor]], wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        if not live or not wanted:
            return [None for _ in wanted]
        results, grads = [t for t, _ in live], [g for _, g in live]
        return torch.autograd.grad(results, wanted, grads, allow_unused=True)

    def made(self, k: int, entries: Sequence[Tensor], own: Sequence[Tensor], step: Step) -> list[Tensor]:
        """Run a link's body on these tensors."""
        body = self.op.link(k)
        vectors, captures = dict(zip(body.entries, entries, strict=True)), {}
        for v, t, streamed in zip(body.own, own, self.of[k].streamed, strict=True):
            if streamed:
                captures[v] = Capture(t, None)
            else:
                vectors[v] = t
        frame = Frame(Bindings({}, captures), vectors, step)
        self.run(body, frame)
        return [without_view(frame.vector(v)) for v in body.made]

    # What the ledger knows

    @contextmanager
    def counted(self, k: int, what: str) -> Iterator[Step]:
        """A block that runs a link: the step as it is to know it. The ledger watches the first of each direction; the
        others need as much. What is kept is watched always. A link that has no tiles is told as one."""
        ledger = self.step.ledger
        if (rehearsal := self.step.rehearsal) is not None:
            with rehearsal.during((TURN, "backward" if what == "backward" else "forward")):
                yield self.step
            return
        if ledger is None or ledger.thorough or what == "kept":
            yield self.step
        elif what in self.needs:
            ledger.expect(self.needs[what])
            yield replace(self.step, ledger=None)
        else:
            with ledger.measured() as most:
                yield self.step
            self.needs[what] = most.size
        if self.whole:
            self.step.done(1)


class LinkFunction(torch.autograd.Function):
    """A link that runs again in backward."""

    @staticmethod
    def forward(ctx: Any, links: Links, k: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.links, ctx.k = links, k
        first = len(links.op.body.entries)
        with links.random.noted(k):
            made = links.forward(k, inputs[:first])
        ctx.save_for_backward(*inputs[first:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t, v in zip(made, links.op.body.made, strict=True) if not v.requires_grad))
        return tuple(made)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        links, k = ctx.links, ctx.k
        found = links.pulled(k, grads, ctx.saved_tensors)
        if not retains_graph():
            links.slots.drop(k)
            if links.held is not None and not k:
                links.held.stored = None
        return None, None, *found


def rehearsed(op: Chain, plan: ChainPlan) -> list[int]:
    """The links that a rehearsal runs, of those that run again and of those that are kept: one, after which maps and
    gradients lie there, and one more."""
    again = op.count - plan.kept
    return [*range(min(2, again)), *range(max(again, op.count - 2), op.count)]


def met(node: Node, plan: ChainPlan) -> set[Value]:
    """The own vectors of the links that a rehearsal runs."""
    op = node.op
    assert isinstance(op, Chain)
    return {v for k in rehearsed(op, plan) for v in op.own(node, k)}


def spare(node: Node, plan: ChainPlan) -> set[Value]:
    """The own vectors of the links that a rehearsal leaves out."""
    op = node.op
    assert isinstance(op, Chain)
    return set(node.inputs[len(op.body.entries) :]) - met(node, plan)


class Held:
    """In a rehearsal, what the links hold that it leaves out: memory of their size, until backward has come by."""

    def __init__(self, op: Chain, plan: ChainPlan, step: Step) -> None:
        self.op, self.plan = op, plan
        ledger = step.ledger
        assert ledger is not None
        self.ledger = ledger
        self.live: list[int] = []
        again = op.count - plan.kept
        self.stored = self.room(min(plan.slots, max(0, again - 1)) * op.body.entry_bytes)
        self.kept: Tensor | None = None
        self.results = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in op.body.results]
        run = len(rehearsed(op, plan))
        self.more = self.room((op.count - run) * sum(v.bytes for v in op.body.results))

    def room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.op.body.made[0].device)

    def keep(self, k: int, entries: Sequence[Tensor]) -> None:
        """A link begins that is kept."""
        if not self.live:
            for t in entries:
                if t.requires_grad:
                    t.register_hook(self.pulled_back)
        self.live.append(self.ledger.live)

    def rest(self, entries: Sequence[Tensor]) -> None:
        """All links have run that do: those that are kept besides hold as much as the last of them."""
        if self.live and self.plan.kept > len(self.live):
            each = self.ledger.live - self.live[-1]
            self.kept = self.room((self.plan.kept - len(self.live)) * each)

    def pulled_back(self, gradient: Tensor) -> None:
        """Backward has gone through all links that are kept."""
        self.kept = None
