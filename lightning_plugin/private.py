"""The private names of PyTorch that the engine uses, in one place: an upgrade that breaks one breaks this file.

Each has a test that says what the engine counts on (`tests/lightning_plugin/test_private.py`), and no other file uses
one. What is private of Lightning belongs to the methods that a strategy overrides, and stays with them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._decomp import decomposition_table as decomposition_table
from torch._decomp import meta_table
from torch._subclasses.fake_impls import has_meta, op_implementations_checks
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    torch_decomp_decompositions,
)
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode as DispatchModeBase
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import SUPPORTED_NODES
from torch.utils._pytree import tree_leaves as pytorchs_leaves
from torch.utils._pytree import tree_map as pytorchs_map
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_plugin.errors import RecordingError

__all__ = [
    "BackwardHookFunction",
    "BatchNormBase",
    "CheckpointFunction",
    "DropoutBase",
    "FakeTensor",
    "FakeTensorMode",
    "InstanceNormBase",
    "WeakTensorKeyDictionary",
    "without_modes",
]

#: A call whose result depends on the data of a tensor that has none.
NEEDS_DATA = (DynamicOutputShapeException, DataDependentOutputException)

#: A block in which tensors answer as they are, whatever their class makes of a call.
plain = torch._C.DisableTorchFunctionSubclass


# Trees

# Trees are PyTorch's own, faster where they are plain. A recording looks through the arguments of every call several
# times, and nearly all are tuples of tensors and numbers (PyTorch's own take eight times as long: a seventh of a step
# that keeps all). Whatever else there is (a dataclass that somebody has registered, a named tuple) is PyTorch's affair.


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with each leaf changed."""
    kind = type(tree)
    if kind is tuple:
        return tuple([tree_map(change, t) for t in tree])
    if kind is list:
        return [tree_map(change, t) for t in tree]
    if kind is dict:
        return {key: tree_map(change, t) for key, t in tree.items()}
    if kind in SUPPORTED_NODES or issubclass(kind, tuple):  # named tuples are nodes, and not registered
        return pytorchs_map(change, tree)
    return change(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in order."""
    found: list[Any] = []
    gather(tree, found)
    return found


def gather(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list:
        for t in tree:
            gather(t, found)
    elif kind is dict:
        for t in tree.values():
            gather(t, found)
    elif kind in SUPPORTED_NODES or issubclass(kind, tuple):
        found += pytorchs_leaves(tree)
    else:
        found.append(tree)


# Tensors


def storage_key(t: Tensor) -> int:
    """The identity of a tensor's memory, which fake tensors have too."""
    return int(t.untyped_storage()._cdata)


def dense_bytes(t: Tensor) -> np.ndarray:
    """The bytes of a tensor of one dimension or more, in the order of its elements. They are a copy's: a tensor with
    dimensions of size one may be contiguous and yet have strides that its bytes have not."""
    found: np.ndarray = t.detach().cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()
    return found


#: Number of writes to a tensor, and the memory it lies in, or -1 if that does not matter.
Version = tuple[int, int]


#: Of tensors that the engine has moved to another tier: the memory they were first in, and the one they are in now.
_MOVED = WeakTensorKeyDictionary()


def memory(t: Tensor) -> int:
    """The identity of the memory that a tensor lies in; that of its first tier where the engine has moved it."""
    key = storage_key(t) if t.layout == torch.strided else -1
    first, now = _MOVED.get(t, (key, key)) if len(_MOVED) else (key, key)
    return int(first) if now == key else key


def give_memory(t: Tensor, values: Tensor) -> None:
    """Have a tensor lie where some values do, which are its own: for its version that is no change."""
    first = memory(t)
    t.data = values
    _MOVED[t] = first, storage_key(t)


def version(t: Tensor) -> Version | None:
    """A value that changes when a tensor is written to, or its ``.data`` replaced; tensors made for inference do not
    say."""
    return None if t.is_inference() else (t._version, memory(t))


def written(t: Tensor) -> Version | None:
    """The same, of whatever memory."""
    return None if t.is_inference() else (t._version, -1)


def lasting(result: Tensor) -> Tensor:
    """A result that the user may write to: no view of something else."""
    return result.clone() if result._is_view() else result


def without_storage(cls: type, like: Tensor, requires_grad: bool) -> Any:
    """A tensor of a class of ours that has all that another has, but memory."""
    return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=requires_grad
    )


def add_each(totals: list[Tensor], others: list[Tensor], times: int) -> None:
    """Add to each of some tensors, in place, so many times another."""
    torch._foreach_add_(totals, others, alpha=times)


def checkpointed() -> weakref.ref[Any] | None:
    """The block that `torch.utils.checkpoint` without reentry is running, which it runs again in backward."""
    pack = _pack_hook()
    if pack is None or not pack.__qualname__.startswith("_checkpoint_hook."):
        return None
    block = weakref.ref(pack)
    hash(block)  # so that it can be a key when the block is gone
    return block


def recomputing() -> bool:
    """True while `torch.utils.checkpoint` without reentry runs a block again."""
    pack = _pack_hook()
    return pack is not None and pack.__qualname__.startswith("_recomputation_hook.")


def _pack_hook() -> Any:
    """The innermost hook that packs what is saved for backward now, if there is one."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def profiles() -> bool:
    """True if a profiler is on."""
    return bool(torch._C._autograd._profiler_enabled())


# Tensors without data


class Fakes(FakeTensorMode):
    """A mode of fake tensors that is made without importing PyTorch's compiler, and keeps no table of its own."""

    def __init__(self, allow_non_fake_inputs: bool) -> None:
        DispatchModeBase.__init__(self)
        self.allow_fallback_kernels = True
        self.allow_non_fake_inputs = allow_non_fake_inputs
        self.allow_meta = self._allow_unsafe_data_ptr_access = True
        self.allow_scalar_outputs = False
        self.cache_enabled = self.cache_crosscheck_enabled = self.propagate_real_tensors = False
        self.fake_tensor_converter = FakeTensorConverter(copy_data=False, export=False)
        self.in_kernel_invocation = False
        self.static_shapes, self.shape_env = True, None
        self.enter_stack = []
        self._stack_trace, self._stack = [], ""  # type: ignore[assignment]
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def on_meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator on fake tensors taken as the meta tensors that they are."""
        with torch._C._DisableTorchDispatch():
            self.in_kernel_invocation = True
            with torch._C._PreserveDispatchKeyGuard():
                torch._C._set_meta_in_tls_dispatch_include(True)
                try:
                    return func(*args, **kwargs)
                finally:
                    self.in_kernel_invocation = False


class Skin:
    """A maker of fake tensors on a device of meta tensors."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.device = device
        self.all_have = dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), device)))

    def around(self, meta: Tensor) -> Tensor:
        """A fake tensor of a meta tensor's memory; to be called where no mode sees it."""
        made: Tensor = Tensor._make_subclass(  # type: ignore[attr-defined]
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        made.__dict__.update(self.all_have)
        return made


@cache
def instead_of_meta(func: Any) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """The function that fake tensors are given to rather than to an operator's meta kernel: a decomposition, or a
    function of the mode, the operator and its arguments. Without a meta kernel, there is none of these either."""
    decomposed = func not in meta_table and func in decomposition_table and torch_decomp_decompositions(func)
    if decomposed:
        return decomposition_table[func], None
    return None, next((answer for said, answer in op_implementations_checks if said(func)), None)


@cache
def has_meta_kernel(func: Any) -> bool:
    return bool(has_meta(func)) and not func._can_decompose()


@cache
def is_composite(func: Any) -> bool:
    """True if an operator is nothing but what it is composed of (``func.decompose``)."""
    return bool(func._can_decompose()) and func not in meta_table and func not in decomposition_table


# Operators and arguments

#: Types of the operators of ``torch.ops``, with their overloads and without.
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
#: The operator that PyTorch asks for a fake tensor's device.
DEVICE_OF = torch.ops.prim.device.default


def schema(func: Any) -> Any:
    """The name, arguments and results of an operator; None for what is no operator."""
    return getattr(func, "_schema", None)


def repeatable(func: Any) -> bool:
    """True if a function is an operator that gives the same each time, and does nothing else."""
    operator = isinstance(func, torch._ops.OpOverload)
    return operator and not func._schema.is_mutable and torch.Tag.nondeterministic_seeded not in func.tags


def operator_name(func: Any) -> str:
    """The name of an operator, as in ``torch.ops.aten``, or of a custom autograd function."""
    if function := custom_function(func):
        return function.__name__
    return str(func._schema.name.removeprefix("aten::"))


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, Any]:
    """The arguments of `Tensor.to`: device, type, non_blocking, memory format."""
    return torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[no-any-return]


def legacy_reduction(size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that a loss's former arguments say."""
    return torch.nn._reduction.legacy_get_string(size_average, reduce)


# The engine of autograd

# [Note: passes] A boundary's cotangent is collected by some segments and used by another, in one pass of autograd. A
# pass may end early (a source fails, a hook raises) or be asked for some inputs only (``autograd.grad(loss, head)``).
# So what one pass has collected is nothing to the next, and nothing is collected for a segment that the pass will not
# run.
#
# [Note: failed] PyTorch keeps what a pass that failed had still to run, gradients and all, in a queue of the
# thread's, and lets it go when a later pass comes upon it. It takes the youngest node first, so it never does so by
# itself: the memory, and files, would be missing in each step to come. So a node that is older than all those is run
# before each plan is chosen, to have them looked at.


def current_pass() -> int:
    """The number of the backward pass under way in this thread, which no other pass has; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def retains_graph() -> bool:
    """True if the pass under way leaves the graph as it is, for another pass."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def unchanged(t: Tensor) -> Tensor:
    """A hook on saved tensors that changes nothing. PyTorch does not look then whether they were written to."""
    return t


def saved_by_hooks() -> bool:
    """True if hooks of the user decide what is saved for backward, as in `torch.utils.checkpoint`."""
    return _pack_hook() not in (None, unchanged)


def will_run(node: Any) -> bool:
    """True if the pass under way runs a node of autograd's graph."""
    return node is not None and bool(torch._C._will_engine_execute_node(node))


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that PyTorch's compiler leaves alone, without importing the compiler for that."""
    guarded: Callable[..., Any] = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (guarded if torch.compiler.is_compiling() or get_eval_frame_callback() else function)(*args, **kwargs)

    return either


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of a function whose own gradients have no graph: it refuses to run where one is asked for
    (``create_graph=True``), as PyTorch's `once_differentiable` does only where the gradient it is given requires grad.
    """

    @wraps(backward)
    def run(*args: Any) -> Any:
        if torch.is_grad_enabled():
            raise RecordingError(
                "backward with create_graph=True was asked of a tiled computation: gradients of gradients would need "
                "every tile at once. Compute the penalty on a crop with plain PyTorch instead."
            )
        one_at_a_time(args)
        return backward(*args)

    return never_compiled(run)


def one_at_a_time(gradients: Iterable[Any]) -> None:
    """Refuse gradients that stand for several."""
    functions = torch._C._functorch
    if any(
        isinstance(g, Tensor) and (functions.is_batchedtensor(g) or functions.is_legacy_batchedtensor(g))
        for g in gradients
    ):
        raise RecordingError(
            "several gradients at once (is_grads_batched, vmap) were asked of a tiled computation, whose tiles are "
            "computed for one. Call backward for each in turn, with retain_graph=True."
        )


def refuse_transforms() -> None:
    """Refuse to record within a transformation of `torch.func`."""
    if torch._C._are_functorch_transforms_active():
        raise RecordingError(
            "a tiled computation was asked for within torch.func (grad, jacrev, jvp, vmap, ...), whose tensors have no "
            "memory that tiles could be read from. Use torch.autograd.grad and backward, give a batch in place of "
            "vmap, or transform the module itself, untiled."
        )


class _Old(threading.local):
    """A node of autograd's for each thread, older than those of the thread's steps; autograd counts them by thread."""

    def __init__(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.leaf = torch.zeros((), device="cpu", requires_grad=True)
            self.node = self.leaf * 1


_old = _Old()


def forget_failed() -> None:
    """Let go of what passes that failed have left in this thread; see [Note: failed]."""
    with torch.inference_mode(False):
        torch.autograd.grad(_old.node, _old.leaf, retain_graph=True)


# What is around


def compiles() -> bool:
    """True if something may have been compiled; importing the compiler takes seconds."""
    return "torch._dynamo" in sys.modules


class TorchDispatchMode(DispatchModeBase):
    """A mode that sees operators; PyTorch's own imports the compiler when it first does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Nowhere:
    """Of a counter, in which modules it counts: in none. PyTorch's own way to know is hooks on all modules of the
    process, which other threads are calling meanwhile."""

    parents = frozenset({"Global"})

    def __enter__(self) -> Nowhere:
        return self

    def __exit__(self, *args: object) -> None:
        return


class FlopCounter(FlopCounterMode):
    """Counts the work of operators, in the thread that it was entered in."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = Nowhere()  # type: ignore[assignment]


def collate_by(kind: type, function: Callable[..., Any]) -> None:
    """Have `torch.utils.data.default_collate` make batches of a class of tensors by a function: the entry of the class
    itself comes before those of its bases."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map.setdefault(kind, function)


_apply: Callable[..., Any] = vars(torch.autograd.Function)["apply"].__func__

#: Classes of tensors that answer calls of custom autograd functions.
_answering: list[type[Tensor]] = []


def _applied(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """`Function.apply` as a function that tensors may override; PyTorch's own is none."""
    for a in (*args, *kwargs.values()):
        for kind in _answering:
            if isinstance(a, kind):
                return kind.__torch_function__(cls.apply, (), args, kwargs)
    return _apply(cls, *args, **kwargs)


torch.autograd.Function.apply = classmethod(_applied)  # type: ignore[method-assign, assignment]


def answers_functions(kind: type[Tensor]) -> None:
    """Have calls of custom autograd functions on a class of tensors go to its `__torch_function__`."""
    _answering.append(kind)


def custom_function(func: Any) -> type[torch.autograd.Function] | None:
    """The custom autograd function that a call applies, if it is one."""
    owner = getattr(func, "__self__", None)
    own = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    return owner if own else None


def step_chain(kind: type[torch.optim.Optimizer]) -> list[Any]:
    """The functions that an optimizer's step is, from the outermost to PyTorch's own."""
    chain: list[Any] = [kind.step]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    return chain


def is_pytorchs(function: Any) -> bool:
    """True if a function was written in PyTorch, whatever name it goes by."""
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.")


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if hooks are called when an optimizer steps, its own or those of all optimizers."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def dispatch_mode() -> Any:
    """The innermost mode that sees operators."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode()
