"""Tensors without data, for one thread at a time.

[Note: threads] A fake tensor belongs to a mode, and a mode has state while it runs an operator. So each thread has
modes of its own, and a recording keeps that of the thread that began it (`Session.fake_mode`). Two threads may record
at the same time, each its own network. Values of two threads' recordings cannot be used in one call.

[Note: remembered] A rehearsal runs the same operators on tensors of the same shapes many times, and only their memory
counts. PyTorch's own fake mode serves more purposes: with it rehearsals take 2.5 to 4 times as long, and planning 1.1
to 2.6 times. This mode calls the same functions in the same order: a decomposition if PyTorch prefers it, PyTorch's
fake implementation if the operator has one, else the operator's meta kernel. For an operator and its arguments it
caches sizes, strides and types of new results. Views, and tensors that are written to, are made each time, which is
fast. All other calls (operators of other libraries, results that depend on data, tensors with data or on several
devices) go to PyTorch's mode.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.private import (
    DEVICE_OF,
    FakeMaker,
    Fakes,
    FakeTensor,
    FakeTensorMode,
    has_meta_kernel,
    is_composite,
    meta_replacement,
    schema,
    storage_key,
)

#: Number of results at which the cache is emptied: plans of many networks may be made in one process.
MAX_RESULTS = 1 << 16
#: Tags of operators whose results depend on data.
DATA_DEPENDENT_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: Types of arguments that are their own cache keys.
CACHEABLE_TYPES = (int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class MemoryEffect(Enum):
    """Effect of an operator on memory."""

    FRESH = "all results are new"
    VIEW = "the result is a view"
    WRITES = "the first argument is written to and given back"
    COMPOSITE = "that of its decomposition"
    OTHER = "anything else"


@cache
def memory_effect(func: Any) -> MemoryEffect:
    """Return the effect of an operator on memory, by its schema."""
    found = schema(func)
    if found is None or func.namespace not in ("aten", "prims") or DATA_DEPENDENT_TAGS.intersection(func.tags):
        return MemoryEffect.OTHER
    if is_composite(func):
        return MemoryEffect.COMPOSITE
    given, made = [a.alias_info for a in found.arguments], [r.alias_info for r in found.returns]
    if not made or any(str(r.type) != "Tensor" for r in found.returns):
        return MemoryEffect.OTHER
    if not any(given):
        return MemoryEffect.OTHER if any(made) else MemoryEffect.FRESH
    if not has_meta_kernel(func) or len(made) > 1 or made[0] is None or given[0] is None or any(given[1:]):
        return MemoryEffect.OTHER
    return MemoryEffect.WRITES if given[0].is_write else MemoryEffect.VIEW


@dataclass(frozen=True)
class TensorFacts:
    """Size, strides, type and device (``maker``) of a new tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    maker: FakeMaker

    def make(self) -> Tensor:
        return self.maker.wrap(torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta"))


class NotCacheable(Exception):
    """A call has arguments that are left to PyTorch's mode."""


class CachingFakeMode(Fakes):
    """Fake mode that caches the metadata of results; see [Note: remembered]."""

    def __init__(self, allow_non_fake_inputs: bool) -> None:
        super().__init__(allow_non_fake_inputs)
        self.results: dict[Any, tuple[TensorFacts | None, ...] | None] = {}
        #: Parts of keys and results, interned, since most tensors are read by several operators.
        self.interned: dict[Any, Any] = {}
        self.makers: dict[torch.device, FakeMaker] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is DEVICE_OF:
            return args[0].device
        kwargs = kwargs or {}
        how = memory_effect(func)
        try:
            if how is MemoryEffect.FRESH:
                return self.run_cached(func, types, args, kwargs)
            if how is MemoryEffect.COMPOSITE:
                self.device_of(args)
                with self:
                    return func.decompose(*args, **kwargs)
            if how is not MemoryEffect.OTHER:
                device = self.device_of(args)
                made = self.on_meta(func, args, kwargs)
                return args[0] if how is MemoryEffect.WRITES else self.maker(device).wrap(made)
        except (NotCacheable, NotImplementedError):
            pass
        return self.dispatch(func, types, args, kwargs)

    def run_cached(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return new results with the cached metadata; run the operator if it is not cached."""
        key = (func, torch.get_default_dtype(), self.cache_key(args), self.cache_key(tuple(kwargs.items())))
        if key in self.results:
            known = self.results[key]
            if known is None:
                raise NotCacheable
            made = tuple([None if facts is None else facts.make() for facts in known])
            return made if len(schema(func).returns) > 1 else made[0]
        found = self.run_uncached(func, types, args, kwargs)
        if len(self.results) >= MAX_RESULTS:
            self.results.clear()
            self.interned.clear()
        self.results[key] = self.facts_of(found if isinstance(found, (tuple, list)) else (found,), args)
        return found

    def run_uncached(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator as PyTorch's mode does, without importing PyTorch's compiler."""
        try:
            device = self.device_of(args) if tensors_in(args) else None
        except NotCacheable:
            return self.dispatch(func, types, args, kwargs)
        decomposition, implementation = meta_replacement(func)
        if decomposition is not None:
            with self:
                return decomposition(*args, **kwargs)
        if implementation is not None:
            found = implementation(self, func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        if not has_meta_kernel(func) or device is None or "device" in kwargs:
            return self.dispatch(func, types, args, kwargs)
        skin = self.maker(device)
        found = self.on_meta(func, args, kwargs)
        if isinstance(found, Tensor):
            return skin.wrap(found)
        return tuple([skin.wrap(t) if isinstance(t, Tensor) else t for t in found])

    def facts_of(self, made: Sequence[Any], args: Any) -> tuple[TensorFacts | None, ...] | None:
        """Return the facts of results; None if a result is not a new tensor that fills its storage."""
        given = {storage_key(t) for t in tensors_in(args)}
        found: list[TensorFacts | None] = []
        for t in made:
            if t is None:
                found.append(None)
                continue
            key = storage_key(t) if type(t) is FakeTensor and t.constant is None else None
            if key is None or key in given or t.storage_offset():
                return None
            given.add(key)
            facts = TensorFacts(t.shape, t.stride(), t.dtype, self.maker(t.device))
            if facts.make().untyped_storage().nbytes() != t.untyped_storage().nbytes():
                return None
            found.append(self.interned.setdefault(facts, facts))
        return tuple(found)

    def maker(self, device: torch.device) -> FakeMaker:
        found = self.makers.get(device)
        if found is None:
            found = self.makers[device] = FakeMaker(self, device)
        return found

    def device_of(self, args: Any) -> torch.device:
        """Return the one device of all tensors among arguments."""
        found: torch.device | None = None
        for t in tensors_in(args):
            if self.has_data(t) or (found is not None and t.device != found):
                raise NotCacheable
            found = t.device
        if found is None:
            raise NotCacheable
        return found

    def has_data(self, t: FakeTensor) -> bool:
        """True if the data of a fake tensor is known; other tensors are not cacheable."""
        if type(t) is not FakeTensor or t.fake_mode is not self or t.layout is not torch.strided or t.is_complex():
            raise NotCacheable
        return t.constant is not None

    def cache_key(self, thing: Any) -> Any:
        """Return the key of an argument: all of it that the metadata of results depends on."""
        kind = type(thing)
        if kind is FakeTensor:
            known = self.has_data(thing)
            found = (
                thing.shape, thing.stride(), thing.storage_offset(), thing.dtype, thing.device, thing.requires_grad,
                known,
            )  # fmt: skip
            return self.interned.setdefault(found, found)
        if kind is tuple or kind is list or kind is torch.Size:
            return tuple([self.cache_key(t) for t in thing])
        if kind is bool or kind is float:  # they may equal an int
            return kind, thing
        if thing is None or kind in CACHEABLE_TYPES:
            return thing
        raise NotCacheable


def tensors_in(args: Any) -> list[Any]:
    """Return the tensors among arguments, and in lists among them."""
    found: list[Any] = []
    for a in args:
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (tuple, list)):
            found += [t for t in a if isinstance(t, Tensor)]
    return found


class Modes(threading.local):
    """Modes of a thread, made on first use.

    Attributes:
        recording: Propagates shapes of recorded calls; tensors with data are refused.
        planning: Runs rules, whose tables of positions are tensors with data.
    """

    @cached_property
    def recording(self) -> FakeTensorMode:
        return CachingFakeMode(allow_non_fake_inputs=False)

    @cached_property
    def planning(self) -> FakeTensorMode:
        return CachingFakeMode(allow_non_fake_inputs=True)


MODES = Modes()
