"""The private names of PyTorch that the engine uses, in one place: an upgrade that breaks one breaks this file.

Each has a test that says what the engine counts on (`tests/lightning_plugin/test_private.py`), and no other file uses
one. What is private of Lightning belongs to the methods that a strategy overrides, and stays with them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

__all__ = [
    "BatchNormBase",
    "DropoutBase",
    "FakeTensor",
    "FakeTensorMode",
    "InstanceNormBase",
    "TorchDispatchMode",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "without_modes",
]

#: A call whose result depends on the data of a tensor that has none.
NEEDS_DATA = (DynamicOutputShapeException, DataDependentOutputException)

#: A block in which tensors answer as they are, whatever their class makes of a call.
plain = torch._C.DisableTorchFunctionSubclass


# Tensors


def storage_key(t: Tensor) -> int:
    """The identity of a tensor's memory, which fake tensors have too."""
    return int(t.untyped_storage()._cdata)


def version(t: Tensor) -> int | None:
    """How often a tensor was written to; tensors made for inference do not say."""
    return None if t.is_inference() else t._version


def is_view(t: Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another."""
    return t._is_view()


def without_storage(cls: type, like: Tensor, requires_grad: bool) -> Any:
    """A tensor of a class of ours that has all that another has, but memory."""
    return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=requires_grad
    )


def add_each(totals: list[Tensor], others: list[Tensor], times: int) -> None:
    """Add to each of some tensors, in place, so many times another."""
    torch._foreach_add_(totals, others, alpha=times)


# Operators and arguments

#: What the operators of ``torch.ops`` are, with their overloads and without.
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def schema(func: Any) -> Any:
    """The name, arguments and results of an operator; None for what is no operator."""
    return getattr(func, "_schema", None)


def operator_name(func: Any) -> str:
    """The name of an operator, as in ``torch.ops.aten``."""
    return str(func._schema.name.removeprefix("aten::"))


def argument_names(func: Any) -> list[str]:
    return [a.name for a in func._schema.arguments]


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, Any]:
    """What the arguments of `Tensor.to` say: device, type, non_blocking, memory format."""
    return torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[no-any-return]


def legacy_reduction(size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that a loss's former arguments say."""
    return torch.nn._reduction.legacy_get_string(size_average, reduce)


# The engine of autograd


def graph_task() -> int:
    """The number of the backward pass under way in this thread, which no other pass has; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def graph_task_keeps_graph() -> bool:
    """Whether the pass under way leaves the graph for another pass."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def graph_task_runs(node: Any) -> bool:
    """Whether the pass under way runs a node."""
    return bool(torch._C._will_engine_execute_node(node))


# What is around


def compiles() -> bool:
    """Whether something may have been compiled; importing the compiler takes seconds."""
    return "torch._dynamo" in sys.modules


def collate_first(kind: type, function: Callable[..., Any]) -> None:
    """Have `torch.utils.data.default_collate` make batches of a class of tensors by a function.

    Its table is searched in order with `isinstance`, so the more special class has to come before `Tensor`.
    """
    from torch.utils.data._utils.collate import default_collate_fn_map

    if kind in default_collate_fn_map:
        return
    entries = dict(default_collate_fn_map)
    default_collate_fn_map.clear()
    default_collate_fn_map[kind] = function
    default_collate_fn_map.update(entries)


def forget_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer call no hooks of its own when it steps."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def dispatch_mode() -> Any:
    """The innermost mode that sees operators."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode()
