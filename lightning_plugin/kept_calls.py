"""Calls of a `TiledModule` that are kept whole: from the second on, the user's own code runs.

[Note: kept calls] Where a budget has room for everything that a call makes, no tile is needed, and what the engine does
around PyTorch's kernels (recording, planning, running a plan) is the largest part of a small step. So the user's module
itself is called if an earlier call with the same *signature* was recorded and planned without tiles, and if the budget
has room for a bound of its bytes: all that plain PyTorch saves for backward, gradients of the same size, and the
largest operator's inputs and results once more; all maps, which a list in the user's code may hold until it returns;
without gradients, all inputs and results. The signature names what decides the memory of most modules: shapes, types
and strides of arguments, modes, ``requires_grad``, autocast. It may miss something, such as a flag that the module
reads. That costs memory and never exactness, since plain PyTorch runs. One call of `RECORDED_EVERY` is recorded again,
and on CUDA the next one after a peak above the budget.

While the graph of such a call is alive, the ledger counts it as a call that waits for its backward: the functions of
its results hold a token. Calls that are recorded meanwhile are planned beside it.

`non_finite` names operators of recorded calls. If small results of a call that was not recorded are not finite, the
next call is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from lightning_plugin.engine import Engine
from lightning_plugin.execute.finite import MAX_ELEMENTS
from lightning_plugin.graph import Recording
from lightning_plugin.ledger import CallBytes
from lightning_plugin.memory import usable
from lightning_plugin.ops import Autocast
from lightning_plugin.plan import Plan
from lightning_plugin.plans import MAX_PLANS, call_bytes, put_last
from lightning_plugin.private import tree_leaves

#: One call of so many is recorded again.
RECORDED_EVERY = 512


def is_untiled(plan: Plan) -> bool:
    """True if a plan runs everything as plain PyTorch does, without tiles and recomputation."""
    grad = torch.is_grad_enabled()
    return all(s.keep or (not grad and s.forward.tiles == 1 and s.tier == "device") for s in plan.segments)


class _Running(local):
    """True while a thread runs a kept call: a `TiledModule` within the user's module is part of it."""

    flag = False


_running = _Running()


@dataclass(eq=False)
class KeptCall:
    """A call of the user's own code; the graph of its results holds this token.

    Attributes:
        bytes: The bound of its bytes.
        runs: Number of calls since one was recorded.
    """

    bytes: CallBytes
    runs: int = 0


@dataclass(eq=False)
class KeptCalls:
    """Finds the calls of a module that are kept whole. Listens to the plans of the module's engine.

    Attributes:
        module: The user's module.
        engine: The engine.
        known: The calls by signature.
        plans: The plans that ran in the call that is being recorded, each with the bound of its bytes.
        finite: True if the small results of the last call were finite; read when the next call begins.
    """

    module: nn.Module
    engine: Engine
    known: dict[Hashable, KeptCall] = field(default_factory=dict)
    plans: list[tuple[Plan, CallBytes]] = field(default_factory=list)
    finite: Tensor | None = None

    def __post_init__(self) -> None:
        self.engine.listener = self

    def __reduce__(self) -> Any:
        """Copy and pickle without what was found: bytes are those of other tensors."""
        return type(self), (self.module, self.engine)

    def on_new_plan(self, plan: Plan, structure: str, random_splits: bool = False) -> None:
        """Do nothing: a new plan is seen when it runs."""

    def on_plan_run(self, plan: Plan, recording: Recording, ranks: int = 1) -> None:
        """Note a plan of the call that is being recorded."""
        found = call_bytes(recording, plan.forecast, self.engine.optimizer_bytes, recording.tensors)
        total, largest = recording.node_bytes  # the largest: what an operator holds for itself, as a sort does
        saved = found.saved if torch.is_grad_enabled() else total
        held = max(0, plan.forecast.made_bytes - saved)  # by code that keeps its intermediate results until it returns
        more = found.workspaces + largest + held
        self.plans.append((plan, found._replace(saved=saved, held=saved, workspaces=more)))

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], record: Callable[[], Any]) -> Any:
        """Call the user's module if the call is known to be kept whole; else ``record`` it."""
        if _running.flag:
            return self.module(*args, **kwargs)
        key = self.signature(args, kwargs)
        call = None if key is None else self.known.get(key)
        if call is None or not self.may_run(call):
            self.plans.clear()
            out = record()
            if key is not None:
                self.remember(key)
            return out
        call.runs += 1
        ledger = self.engine.ledger
        assert ledger is not None
        if ledger.uses_allocator and not ledger.calls:
            ledger.begin()
        with running():
            out = self.module(*args, **kwargs)
        token = KeptCall(call.bytes)
        small: list[Tensor] = []
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.grad_fn is not None:
                hold(t.grad_fn, token)
                ledger.calls[token] = call.bytes
                small += [t] if t.numel() <= MAX_ELEMENTS else []
        if small:
            self.finite = torch.stack([t.detach().isfinite().all() for t in small]).all()
        return out

    def may_run(self, call: KeptCall) -> bool:
        """True if the budget has room for the call beside those that wait for backward, and nothing asks for a
        recording."""
        finite, self.finite = self.finite, None
        ledger, planner, budget = self.engine.ledger, self.engine.planner, self.engine.options.budget
        if ledger is None or budget is None or call.runs >= RECORDED_EVERY:
            return False
        if ledger.excess or (finite is not None and not finite):
            return False
        others = planner.reserved - sum(self.engine.optimizer_bytes.values())
        return ledger.bytes_to_keep_all(call.bytes) + max(0, others) <= usable(budget - (planner.workspaces or 0))

    def remember(self, key: Hashable) -> None:
        """Remember a recorded call, if all of it was kept."""
        self.known.pop(key, None)
        if self.plans and all(is_untiled(plan) for plan, _ in self.plans):
            largest = max((call for _, call in self.plans), key=lambda call: call.saved)
            weights = {key: size for _, call in self.plans for key, size in call.weights.items()}
            saved = sum(call.saved for _, call in self.plans)  # of several runs, if a value was asked for
            put_last(self.known, key, KeptCall(largest._replace(weights=weights, saved=saved, held=saved)), MAX_PLANS)
        self.plans.clear()

    def signature(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable | None:
        """Return what decides the memory of a call; None if it is always recorded."""
        engine, options = self.engine, self.engine.options
        if options.budget is None or options.plan is not None or options.splitting is not None:
            return None
        if engine.homes or engine.planner.team is not None:
            return None
        facts: list[Hashable] = []
        for a in tree_leaves((args, kwargs)):
            if isinstance(a, Tensor):
                if type(a) is not Tensor or a.layout is not torch.strided:
                    return None
                facts.append((a.shape, a.stride(), a.dtype, a.device, a.requires_grad))
            else:
                facts.append(repr(a) if a is None or isinstance(a, (bool, int, float, str)) else type(a).__qualname__)
        devices = {fact[3] for fact in facts if isinstance(fact, tuple)}
        return (
            tuple(facts),
            tuple(kwargs),
            torch.is_grad_enabled(),
            options.budget,
            tuple(map(Autocast.current, devices)),
            tuple(m.training for m in self.module.modules()),
            tuple(p.requires_grad for p in self.module.parameters()),
        )


def hold(function: Any, token: KeptCall) -> None:
    """Have a function of autograd hold a token."""
    function.metadata[KeptCall] = token


@contextmanager
def running() -> Iterator[None]:
    """Mark a kept call of this thread."""
    _running.flag = True
    try:
        yield
    finally:
        _running.flag = False
