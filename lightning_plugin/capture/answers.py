"""Answers to calls on lazy tensors: some have answers of their own, others are recorded (see `calls`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.attributes import READS, read_attribute, write_attribute
from lightning_plugin.capture.calls import call
from lightning_plugin.capture.gradients import GRADIENTS
from lightning_plugin.capture.lazy import LazyImage, LazyTensor
from lightning_plugin.capture.materialize import computed, materialize
from lightning_plugin.capture.paths import module_path
from lightning_plugin.capture.session import bound
from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Value
from lightning_plugin.private import BackwardHookFunction, CheckpointFunction, answers_functions, parse_to, plain
from lightning_plugin.trees import tree_map


def answer_calls() -> None:
    """Has calls on lazy tensors answered."""
    LazyTensor._answer = answer
    answers_functions(LazyTensor)


def answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a call on lazy tensors."""
    special = SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if func in READS or name == "__get__":
        return read_attribute(func, args, kwargs)
    if name == "__set__":
        return write_attribute(func, *args)
    return call(func, args, kwargs)


def _executed(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that needs data: run on the real tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(materialize, (args, kwargs))
        return func(*args, **kwargs)

    return run


def _to(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
    """Moving an image moves where its tiles go; anything else about ``to`` is an operator."""
    if isinstance(self, LazyImage):
        device, dtype, _, memory_format = parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
        if dtype is None or dtype == self.dtype:
            if device is None or device == self.device:
                return self if memory_format is None else call(Tensor.to, (self,), {"memory_format": memory_format})
            return type(self)(
                self._source, device=device, requires_grad=self.requires_grad, engine=self._session.engine
            )
    return call(Tensor.to, (self, *args), kwargs)


def _refuse(what: str, way_out: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        path = module_path()
        where = f" in '{path}'" if path else ""
        raise RecordingError(f"{what} on a lazy tensor{where} is not possible: {way_out}")

    return refuse


def _representation(self: LazyTensor, **kwargs: Any) -> str:
    value = bound(self._fake)
    if isinstance(value, Value) and (real := computed(self, value)) is not None:
        return repr(real)
    if isinstance(value, Value) and not value.is_map:
        return repr(materialize(self))
    with plain():
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


def _same(self: LazyTensor, *args: Any, **kwargs: Any) -> LazyTensor:
    return self


#: Functions that have answers of their own.
SPECIAL: dict[Any, Callable[..., Any]] = {
    **{
        getattr(Tensor, name): _executed(getattr(Tensor, name))
        for name in (
            "item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __contains__ "
            "__array__ __format__ is_nonzero nonzero allclose equal"
        ).split()
    },
    torch.allclose: _executed(torch.allclose),
    torch.equal: _executed(torch.equal),
    torch.is_nonzero: _executed(torch.is_nonzero),
    torch.nonzero: _executed(torch.nonzero),
    Tensor.__repr__: _representation,
    **GRADIENTS,
    Tensor.to: _to,
    Tensor.cuda: lambda self, device=None, **kw: _to(self, torch.device("cuda") if device is None else device),
    Tensor.pin_memory: _same,
    Tensor.share_memory_: _same,
    Tensor.is_pinned: lambda self, *a, **k: False,
    Tensor.is_shared: lambda self: False,
    Tensor.data_ptr: _refuse("data_ptr()", "it has no memory."),
    Tensor.untyped_storage: _refuse("untyped_storage()", "it has no memory."),
    Tensor.set_: _refuse("set_()", "it has no memory."),
    Tensor.resize_: _refuse("resize_()", "it has no memory."),
    CheckpointFunction.apply: _refuse(
        "torch.utils.checkpoint with use_reentrant=True",
        "its computation is hidden from the recording. Pass use_reentrant=False.",
    ),
    BackwardHookFunction.apply: _refuse(
        "a full backward hook on a module",
        "it would need a map that is nowhere whole. Remove the hook (hooks on parameters work), or call the module on "
        "materialize(x), a map that is held whole.",
    ),
}
for _name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):

    def _factory(self: LazyTensor, *args: Any, _name: str = _name, **kwargs: Any) -> Tensor:
        kwargs.setdefault("dtype", self.dtype)
        kwargs.setdefault("device", self.device)
        return getattr(torch.empty(0), _name)(*args, **kwargs)

    SPECIAL[getattr(Tensor, _name)] = _factory
