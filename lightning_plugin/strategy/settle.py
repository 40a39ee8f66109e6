"""Turning what a step recorded into ordinary tensors, all of it under one plan.

A step's loss, its logged values and its buffers' updates belong to one pass over the image. So a step is
settled as a whole when it ends: what it returned becomes ordinary tensors with a ``grad_fn``, what it
logged knows its value, and what it recorded and dropped (a BatchNorm's running statistics) happens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_plugin.capture.lazy import LazyTensor
from lightning_plugin.capture.materialize import known
from lightning_plugin.capture.run import execute
from lightning_plugin.capture.session import Session
from lightning_plugin.graph import Value
from lightning_plugin.recording import gathered
from lightning_plugin.strategy.batch import lazy_tensors


def settle(returned: Any, batch: Iterable[LazyTensor]) -> Any:
    """What a step returned, as ordinary tensors; runs whatever else was recorded from its batch."""
    wanted = lazy_tensors(returned)
    sessions = {id(s): s for t in (*wanted, *batch) for s in (t._session.root(),)}
    results: dict[int, Tensor] = {}
    for session in sessions.values():
        mine = [t for t in wanted if t._session.root() is session]
        results.update(run(session, mine))

    def real(t: LazyTensor) -> Any:
        return results[id(t)] if id(t) in results else known(t)

    return apply_to_collection(returned, LazyTensor, real) if wanted else returned


def run(session: Session, wanted: list[LazyTensor]) -> dict[int, Tensor]:
    """Execute one recording; what the wanted tensors are that were not known before."""
    asked: dict[int, Value] = {}
    for t in wanted:
        value = known_value(t)
        if value is not None:
            asked[id(t)] = gathered(value) if value.is_map else value
    alive = [t for ref in session.pending if (t := ref()) is not None]
    session.pending = []
    waiting = [v for t in alive if (v := known_value(t)) is not None]
    values = list(dict.fromkeys((*asked.values(), *waiting)))
    if not values and all(effect.dormant for effect in session.effects):
        return {}
    execute(session, None, values)
    results = {key: session.vectors[value] for key, value in asked.items()}
    session.forget()
    return results


def known_value(tensor: LazyTensor) -> Value | None:
    """The value of a tensor that has still to be computed."""
    known(tensor)  # refuses what went through a custom autograd function
    value = tensor._value
    return None if value in tensor._session.root().vectors else value
