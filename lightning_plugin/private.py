"""All uses of PyTorch's private names: an upgrade of PyTorch that breaks one breaks this file.

Each has a test of the behaviour that the engine relies on (`tests/lightning_plugin/test_private.py`). Private names of
Lightning belong to the methods that a strategy overrides, and are used there.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, wraps
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
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.function import _SingleLevelFunction
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode as DispatchModeBase
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import SUPPORTED_NODES
from torch.utils._pytree import tree_leaves as torch_tree_leaves
from torch.utils._pytree import tree_map as torch_tree_map
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

#: Errors of a call on fake tensors whose result depends on data, or is a nested or a sparse tensor.
NEEDS_DATA = (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException)


def needs_data(error: RuntimeError) -> bool:
    """True for the error of a call on fake tensors that needs their data; a kernel that reads memory by itself, as that
    of `torch.tensor_split` reads a tensor of ends, has no error of its own."""
    return isinstance(error, NEEDS_DATA) or "its data is not allocated yet" in str(error)


def data_dependent(error: RuntimeError) -> str:
    """Return the name of the operator of an error that needs data."""
    return str(getattr(error, "func", "an operator"))


#: Context manager in which calls on tensor subclasses skip ``__torch_function__``.
without_torch_function = torch._C.DisableTorchFunctionSubclass


# Trees

# The trees of `torch.utils._pytree`, with a fast path for tuples, lists and dicts. A recording traverses the arguments
# of every call several times, and nearly all are tuples of tensors and numbers: PyTorch's functions take eight times as
# long, a seventh of a step that keeps all. Other nodes (registered dataclasses, named tuples) are left to PyTorch.


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with a function applied to each leaf."""
    kind = type(tree)
    if kind is tuple:
        return tuple([tree_map(change, t) for t in tree])
    if kind is list:
        return [tree_map(change, t) for t in tree]
    if kind is dict:
        return {key: tree_map(change, t) for key, t in tree.items()}
    if kind in SUPPORTED_NODES or issubclass(kind, tuple):  # named tuples are nodes, and not registered
        return torch_tree_map(change, tree)
    return change(tree)


#: Types of most leaves.
LEAVES = frozenset({int, float, bool, str, type(None), Tensor, torch.nn.Parameter, torch.dtype, torch.device})


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    found: list[Any] = []
    add_leaves(tree, found)
    return found


def add_leaves(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list:
        for t in tree:
            if type(t) in LEAVES:
                found.append(t)
            else:
                add_leaves(t, found)
    elif kind is dict:
        for t in tree.values():
            add_leaves(t, found)
    elif kind in SUPPORTED_NODES or issubclass(kind, tuple):
        found += torch_tree_leaves(tree)
    else:
        found.append(tree)


# Tensors


def storage_key(t: Tensor) -> int:
    """Return the identity of a tensor's storage, which fake tensors have too."""
    return int(t.untyped_storage()._cdata)


def dense_bytes(t: Tensor) -> np.ndarray:
    """Return a copy of a tensor's bytes in the order of its elements; the tensor has one dimension or more.

    A contiguous tensor may have any stride in dimensions of size one, hence the copy.
    """
    found: np.ndarray = t.detach().cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()
    return found


def values_in_memory(t: Tensor) -> Tensor:
    """Return a view without the marks of a conjugate and a negative that PyTorch computes when it reads them."""
    t = t.conj() if t.is_conj() else t
    return neg_view(t) if t.is_neg() else t


def neg_view(t: Tensor) -> Tensor:
    """Return the negative of a tensor as a view, which PyTorch computes when it reads it."""
    return t._neg_view()


#: Number of writes to a tensor, and the identity of its storage, or -1 if it is not compared.
Version = tuple[int, int]


#: For each storage to which the engine has moved a tensor, and while it lives, the tensor's first storage. By storage
#: and not by tensor, since autograd hands back an alias of a tensor that it has saved.
_FIRST_STORAGES: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}


def storage_identity(t: Tensor) -> int:
    """Return the identity of a tensor's storage; of one to which the engine has moved a tensor, that of its first."""
    key = storage_key(t) if t.layout == torch.strided else -1
    return _FIRST_STORAGES[key][1] if key in _FIRST_STORAGES else key


def move_storage(t: Tensor, values: Tensor) -> None:
    """Give a tensor the storage of ``values``, a copy of its own values; its version stays the same."""
    first, storage, key = storage_identity(t), values.untyped_storage(), storage_key(values)
    t.data = values
    _FIRST_STORAGES[key] = weakref.ref(storage, lambda _: _FIRST_STORAGES.pop(key, None)), first


#: For each tensor by its ``id``, while it lives, the number of writes that PyTorch's own count leaves out.
_UNCOUNTED_WRITES: dict[int, tuple[weakref.ref[Tensor], int]] = {}


@contextmanager
def uncounted_writes(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Write tensors in a block as PyTorch's BatchNorm writes its running statistics: a graph of plain PyTorch that has
    saved them stays valid. `version` counts the block as one write."""
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(tensors)):
        yield
    for t in tensors:
        key = id(t)
        before = _UNCOUNTED_WRITES[key][1] if key in _UNCOUNTED_WRITES else 0
        _UNCOUNTED_WRITES[key] = weakref.ref(t, partial(_forget_writes, key)), before + 1


def _forget_writes(key: int, _: object) -> None:
    _UNCOUNTED_WRITES.pop(key, None)


def version(t: Tensor) -> Version | None:
    """Return a value that changes when a tensor is written to or its ``.data`` is replaced; None for inference
    tensors."""
    written = write_count(t)
    return None if written is None else (written[0], storage_identity(t))


def write_count(t: Tensor) -> Version | None:
    """Return a value that changes when a tensor is written to; None for inference tensors."""
    if t.is_inference():
        return None
    uncounted = _UNCOUNTED_WRITES.get(id(t))
    return t._version + (0 if uncounted is None else uncounted[1]), -1


def without_view(result: Tensor) -> Tensor:
    """Return a result that the user may write to: a view is cloned."""
    return result.clone() if result._is_view() else result


def without_storage(cls: type, like: Tensor, requires_grad: bool) -> Any:
    """Make a tensor of a subclass with the metadata of another tensor and without storage."""
    return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=requires_grad
    )


def become(tensor: Tensor, result: Tensor) -> None:
    """Make the object of a tensor without storage the object of a result.

    Whoever holds ``tensor`` then holds the result, with its place in autograd's graph. The object ``result`` stays an
    ordinary tensor with the same memory; if it requires grad, it becomes a view of the other one.
    """
    swap: Callable[[Tensor, Tensor], None] = torch._C._swap_tensor_impl  # type: ignore[attr-defined]
    with without_torch_function(), torch.inference_mode(False), torch.enable_grad():
        tensor.__class__ = type(result)  # type: ignore[assignment]
        if result.requires_grad:
            swap(tensor, result)
            swap(result, tensor.view_as(tensor))
        else:
            swap(tensor, result.detach())


def take_metadata(tensor: Tensor, other: Tensor) -> None:
    """Give the object of a tensor without storage the shape and the attributes of another one, which is lost."""
    with without_torch_function():
        torch._C._swap_tensor_impl(tensor, other)  # type: ignore[attr-defined]
    vars(tensor).update(vars(other))


def add_each(totals: list[Tensor], others: list[Tensor], times: int) -> None:
    """Add a multiple of another tensor to each of some tensors, in place."""
    torch._foreach_add_(totals, others, alpha=times)


def checkpoint_block() -> weakref.ref[Any] | None:
    """Return the block of non-reentrant `torch.utils.checkpoint` that is running, which runs again in backward."""
    pack = _pack_hook()
    if pack is None or not pack.__qualname__.startswith("_checkpoint_hook."):
        return None
    block = weakref.ref(pack)
    hash(block)  # a weak reference keeps its hash after the block is freed only if it was asked before
    return block


def is_recomputing() -> bool:
    """True while non-reentrant `torch.utils.checkpoint` runs a block again."""
    pack = _pack_hook()
    return pack is not None and pack.__qualname__.startswith("_recomputation_hook.")


@contextmanager
def outside_checkpoint() -> Iterator[None]:
    """Suspend the hooks of the innermost `torch.utils.checkpoint`, if it is non-reentrant."""
    hooks = None
    if checkpoint_block() is not None or is_recomputing():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[call-arg]
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        if hooks is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def _pack_hook() -> Any:
    """Return the innermost pack hook of saved tensors; None without hooks."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def is_profiling() -> bool:
    """True if a profiler is on."""
    return bool(torch._C._autograd._profiler_enabled())


# Tensors without data


class Fakes(FakeTensorMode):
    """Fake mode that does not import PyTorch's compiler and does not cache."""

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
        """Run an operator's meta kernel on fake tensors, which are meta tensors."""
        with torch._C._DisableTorchDispatch():
            self.in_kernel_invocation = True
            with torch._C._PreserveDispatchKeyGuard():
                torch._C._set_meta_in_tls_dispatch_include(True)
                try:
                    return func(*args, **kwargs)
                finally:
                    self.in_kernel_invocation = False


class FakeMaker:
    """Maker of fake tensors on a device, from meta tensors."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.device = device
        self.attributes = dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), device)))

    def wrap(self, meta: Tensor) -> Tensor:
        """Make a fake tensor with a meta tensor's storage; no dispatch mode may be active."""
        made: Tensor = Tensor._make_subclass(  # type: ignore[attr-defined]
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        made.__dict__.update(self.attributes)
        return made


@cache
def meta_replacement(func: Any) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Return the decomposition and the fake implementation that PyTorch prefers to an operator's meta kernel, or None
    for each; a fake implementation takes the mode, the operator and its arguments."""
    decomposed = func not in meta_table and func in decomposition_table and torch_decomp_decompositions(func)
    if decomposed:
        return decomposition_table[func], None
    return None, next((implementation for applies, implementation in op_implementations_checks if applies(func)), None)


@cache
def has_meta_kernel(func: Any) -> bool:
    return bool(has_meta(func)) and not func._can_decompose()


@cache
def is_composite(func: Any) -> bool:
    """True for a composite operator, which runs by ``func.decompose`` alone."""
    return bool(func._can_decompose()) and func not in meta_table and func not in decomposition_table


# Operators and arguments

#: Types of the operators of ``torch.ops``, with their overloads and without.
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
#: The operator that PyTorch asks for a fake tensor's device.
DEVICE_OF = torch.ops.prim.device.default
#: The operator of `torch.autograd.forward_ad.make_dual`.
make_dual = torch._make_dual
#: The function of ONNX's exporter that returns a shape as a tensor.
shape_as_tensor = torch._shape_as_tensor


def schema(func: Any) -> Any:
    """Return the schema of an operator; None for other functions."""
    return getattr(func, "_schema", None)


def is_deterministic(func: Any) -> bool:
    """True for an operator without random numbers and writes."""
    operator = isinstance(func, torch._ops.OpOverload)
    return operator and not func._schema.is_mutable and torch.Tag.nondeterministic_seeded not in func.tags


def operator_name(func: Any) -> str:
    """Return the name of an operator, as in ``torch.ops.aten``, or of a custom autograd function."""
    if function := custom_function(func):
        return function.__name__
    return str(func._schema.name.removeprefix("aten::"))


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, Any]:
    """Return the arguments of `Tensor.to`: device, type, non_blocking, memory format."""
    return torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[no-any-return]


def legacy_reduction(size_average: bool | None, reduce: bool | None) -> str:
    """Return the ``reduction`` that a loss's deprecated arguments stand for."""
    return torch.nn._reduction.legacy_get_string(size_average, reduce)


#: Context manager in which calls skip autograd and make no graph.
below_autograd = torch._C._AutoDispatchBelowAutograd


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context without autocast on a type of device."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def settings() -> tuple[Any, ...]:
    """Return the settings of PyTorch that decide which ATen calls an operator makes."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_mkldnn_enabled(),  # type: ignore[attr-defined]
    )


def direct(func: Any) -> Any:
    """Return an operator of ``torch.ops`` as a function in C."""
    return func._op


# The engine of autograd

# [Note: passes] A boundary's cotangent is summed by its readers and used by its producer, in one backward pass. A pass
# may end early (a source fails, a hook raises) or run for some inputs only (``autograd.grad(loss, head)``). So the sums
# of one pass are dropped before the next, and no cotangent is summed for a segment that the pass will not run.
#
# [Note: failed] After a backward pass that failed, PyTorch keeps the nodes that did not run, with their gradients, in
# the thread's queue, until a later pass takes them from it. A pass takes the youngest node first and ends before it
# comes to them, so their memory and files would never be freed. Before each plan is chosen, a node older than all of
# them is therefore run: that pass takes them from the queue and drops them.


def current_pass() -> int:
    """Return the unique number of the backward pass that runs in this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def retains_graph() -> bool:
    """True if the running backward pass keeps the graph (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def identity_hook(t: Tensor) -> Tensor:
    """Hook on saved tensors that returns them; with hooks, PyTorch does not check for writes in place."""
    return t


def has_saved_tensor_hooks() -> bool:
    """True if the user's hooks on saved tensors are active, as in `torch.utils.checkpoint`."""
    return _pack_hook() not in (None, identity_hook)


@contextmanager
def saved_tensor_hooks_allowed() -> Iterator[None]:
    """Allow the engine's own hooks on saved tensors, also within `torch.autograd.graph.disable_saved_tensors_hooks`."""
    reason = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()  # type: ignore[attr-defined]
    torch._C._autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        if reason is not None:
            torch._C._autograd._saved_tensors_hooks_disable(reason)


def is_scheduled(node: Any) -> bool:
    """True if the running backward pass will run a node of autograd's graph."""
    return node is not None and bool(torch._C._will_engine_execute_node(node))


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a method from PyTorch's compiler, without importing the compiler."""
    guarded: Callable[..., Any] = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():  # strict torch.export reads this code, and quotes the error in its own
            refuse_export()
        return (guarded if torch.compiler.is_compiling() or get_eval_frame_callback() else function)(*args, **kwargs)

    return either


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an autograd function: it refuses ``create_graph=True``.

    PyTorch's `once_differentiable` refuses it only if the incoming gradient requires grad.
    """

    @wraps(backward)
    def run(*args: Any) -> Any:
        if torch.is_grad_enabled():
            raise RecordingError(
                "backward with create_graph=True was called on a tiled computation: gradients of gradients would need "
                "every tile at once. Compute the penalty on a crop with plain PyTorch instead."
            )
        refuse_batched(args)
        return backward(*args)

    return never_compiled(run)


def refuse_batched(gradients: Iterable[Any]) -> None:
    """Refuse batched gradients."""
    functions = torch._C._functorch
    if any(
        isinstance(g, Tensor) and (functions.is_batchedtensor(g) or functions.is_legacy_batchedtensor(g))
        for g in gradients
    ):
        raise RecordingError(
            "batched gradients (is_grads_batched, vmap) were asked of a tiled computation, whose tiles are computed "
            "for one gradient at a time. Call backward for each in turn, with retain_graph=True."
        )


def refuse_export() -> None:
    """Refuse to run while a graph is exported: it would have the tiles of one image, or none."""
    if torch.compiler.is_exporting() or is_traced():
        raise RecordingError(
            "torch.jit.trace, torch.fx, make_fx, torch.onnx or torch.export met a TiledModule, whose tiles depend on "
            "the size of each image and on the budget. Export the module within it: tiled.module, which has the same "
            "parameters."
        )


def is_traced() -> bool:
    """True while a graph is recorded by `torch.jit.trace`, `torch.fx` or proxies."""
    by_proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    return by_proxies or torch._C._is_tracing() or is_fx_symbolic_tracing()


def refuse_transforms(tensor: Tensor | None = None) -> None:
    """Refuse to record within a transformation of `torch.func`, and a tensor that has a tangent."""
    if torch._C._are_functorch_transforms_active():
        raise RecordingError(
            "a tiled module was called within torch.func (grad, jacrev, jvp, vmap, ...), whose tensors have no memory "
            "that tiles could be read from. Use torch.autograd.grad and backward, give a batch in place of vmap, or "
            "transform the module itself, untiled."
        )
    if tensor is not None and unpack_dual(tensor).tangent is not None:
        raise RecordingError(
            "a tensor with a tangent (torch.autograd.forward_ad) was given to a tiled computation, which is "
            "differentiated backwards only: the tangent would be lost. Use backward or torch.autograd.grad, or call "
            "the module itself, untiled."
        )


class _OldestNode(threading.local):
    """Autograd node of each thread that is older than those of its steps; autograd numbers nodes by thread."""

    def __init__(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.leaf = torch.zeros((), device="cpu", requires_grad=True)
            self.node = self.leaf * 1


_old = _OldestNode()


def release_failed_passes() -> None:
    """Free the nodes that failed backward passes have left in this thread; see [Note: failed]."""
    with torch.inference_mode(False):
        torch.autograd.grad(_old.node, _old.leaf, retain_graph=True)


# Compiler, modes and optimizers


def has_compiler() -> bool:
    """True if PyTorch's compiler is imported, so that modules may be compiled."""
    return "torch._dynamo" in sys.modules


class TorchDispatchMode(DispatchModeBase):
    """Dispatch mode that does not import PyTorch's compiler, as PyTorch's own does on first use."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class NoModuleTracker:
    """Module tracker of `FlopCounter` that attributes all work to no module.

    PyTorch's tracker registers hooks on all modules of the process, which other threads may be calling.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> NoModuleTracker:
        return self

    def __exit__(self, *args: object) -> None:
        return


class FlopCounter(FlopCounterMode):
    """Counter of floating-point operations in the thread that enters it."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = NoModuleTracker()  # type: ignore[assignment]


def collate_by(kind: type, function: Callable[..., Any]) -> None:
    """Register a function with which `torch.utils.data.default_collate` makes batches of a tensor subclass."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map.setdefault(kind, function)


#: Tensor subclasses whose ``__torch_function__`` gets calls of custom autograd functions.
_overriding: set[type[Tensor]] = set()


def _applied(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Call a custom function, which tensor subclasses may override here; PyTorch does not let them."""
    for a in (*args, *kwargs.values()):
        for kind in _overriding:
            if isinstance(a, kind):
                return kind.__torch_function__(cls.apply, (), args, kwargs)
    return super(_SingleLevelFunction, cls).apply(*args, **kwargs)  # type: ignore[misc]


_call_scripted = torch.jit.ScriptFunction.__call__


def _called(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a scripted or traced function; on tensor subclasses that override it, the Python function that it was made
    of, as `torch.compile` does: TorchScript's interpreter knows no ``__torch_function__``."""
    if any(isinstance(a, tuple(_overriding)) for a in tree_leaves((args, kwargs))):
        return function._torchdynamo_inline(*args, **kwargs)
    return _call_scripted(function, *args, **kwargs)


def override_functions(kind: type[Tensor]) -> None:
    """Send calls of custom autograd functions on a tensor subclass to its ``__torch_function__``, and have scripted
    functions run as Python.

    `Function.apply` stays as it is, since modules keep it (``relu = ReLU.apply``) before any tensor is made: the
    function is put behind it, where it calls that of the class above.
    """
    _overriding.add(kind)
    _SingleLevelFunction.apply = classmethod(_applied)  # type: ignore[attr-defined]
    torch.jit.ScriptFunction.__call__ = _called  # type: ignore[assignment]


def custom_function(func: Any) -> type[torch.autograd.Function] | None:
    """Return the custom autograd function whose ``apply`` is called; None for other calls."""
    owner = getattr(func, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else None


def step_wrappers(kind: type[torch.optim.Optimizer]) -> list[Any]:
    """Return the wrappers of an optimizer's ``step``, outermost first, and the innermost function."""
    chain: list[Any] = [kind.step]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    return chain


def is_defined_in_torch(function: Any) -> bool:
    """True if a function is defined in PyTorch."""
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.")


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer's step calls hooks, its own or global ones."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def after_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def fsdp_state(hook: tuple[Any, ...]) -> Any:
    """Return the state of the FSDP module that registers a hook on its results; None for hooks of others."""
    owners = (owner for h in hook for owner in (getattr(h, "__self__", None), *getattr(h, "args", ())))
    return next((o for o in owners if type(o).__module__.startswith("torch.distributed.fsdp")), None)


def dispatch_mode() -> Any:
    """Return the innermost dispatch mode."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode()


def declare_constants(tensors: Iterable[Tensor]) -> None:
    """Tell dispatch modes that these tensors, which they did not see made, depend on numbers of Python alone."""
    for mode in dispatch_modes():
        if hasattr(mode, "add_constants"):
            mode.add_constants(tensors)


def dispatch_modes() -> list[Any]:
    """Return the active dispatch modes, outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return _get_current_dispatch_mode_stack()
