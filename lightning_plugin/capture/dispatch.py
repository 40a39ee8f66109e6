"""Dispatch of calls on lazy tensors: special functions have handlers, other calls are recorded (see `record`), and
calls on computed results run.

[Note: rows] If tiles cut the axis of images, a result with one row for each image or patch is a map. When its place in
autograd's graph is needed (a hook, ``retain_grad``), it is materialized and becomes an ordinary tensor, as a small
result would. This is refused if a recorded operator has read the map before: that operator reads tiles, so that its
gradient would not reach the ordinary tensor. Maps with spatial axes are refused too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.alias import view_of
from lightning_plugin.capture.indices import MASK_DTYPES, index_to_read, index_to_write
from lightning_plugin.capture.lazy import (
    LazyImage,
    LazyTensor,
    computed_or_same,
    computed_vector,
    lazy_tensors,
    materialize,
    merge_sessions,
)
from lightning_plugin.capture.record import WritesImage, record, tensor_of_image
from lightning_plugin.capture.run import count_batch, run_awaited_updates
from lightning_plugin.capture.session import (
    Session,
    bind,
    binding_of,
    call_label,
    current_module,
    innermost_module,
    logging_to,
)
from lightning_plugin.capture.transcript import add_call, begin_log, given_arguments, repeat
from lightning_plugin.errors import EngineError, RecordingError
from lightning_plugin.graph import Value, ancestors
from lightning_plugin.private import (
    BackwardHookFunction,
    BatchNormBase,
    CheckpointFunction,
    UnsupportedOperatorException,
    Version,
    fsdp_state,
    make_dual,
    needs_data,
    parse_to,
    shape_as_tensor,
    take_metadata,
    tree_map,
    version,
    without_torch_function,
)
from lightning_plugin.rules.pointwise import KeepGradient
from lightning_plugin.source import TensorSource


def install_dispatch() -> None:
    """Have `LazyTensor` dispatch its calls here; called once, by the package."""
    LazyTensor._dispatch = dispatch


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a call on lazy tensors."""
    handler = HANDLERS.get(func)
    if handler is not None:
        return handler(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if func in METADATA_METHODS or name == "__get__":
        return read_attribute(func, args, kwargs)
    if name == "__set__":
        return write_attribute(func, *args)
    try:
        return record_call(func, args, kwargs)
    except EngineError:
        norm = innermost_module() if func is torch.nn.functional.batch_norm else None
        if isinstance(norm, BatchNormBase) and norm.training:  # it has counted a batch that is refused
            count_batch(norm, -1)
        raise


# Calls that are recorded

INPLACE_DUNDERS = {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__",
    "__ixor__", "__ilshift__", "__irshift__", "__setitem__",
}  # fmt: skip


#: Functions whose second argument is an index; the gradient of what they write needs the positions of its masks.
INDEX_PUTS = {torch.index_put, torch.index_put_, Tensor.index_put, Tensor.index_put_}
#: Functions whose index is brought into its normal form before they are compared or recorded.
INDEXED = {Tensor.__getitem__, Tensor.__setitem__, *INDEX_PUTS}


def writes_to_real(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """True of a call that would write lazy values into an ordinary tensor."""
    name = getattr(func, "__name__", "")
    inplace = (name.endswith("_") and not name.endswith("__")) or name in INPLACE_DUNDERS
    first = args[0] if args else None
    out = kwargs.get("out")
    return (inplace and isinstance(first, Tensor) and not isinstance(first, LazyTensor)) or (
        isinstance(out, Tensor) and not isinstance(out, LazyTensor)
    )


def record_call(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Record a call, unless it was seen, or run it if all its tensors are ordinary ones or computed."""
    if func not in INDEXED:
        sessions = {t._session.root() for t in lazy_tensors((args, kwargs))}
        session = sessions.pop()
        if not sessions and not session.vectors:
            found = repeat(func, args, kwargs, session)
            if found is not NotImplemented:
                return found
    args, kwargs = tree_map(lambda a: computed_or_same(a, func), (tuple(args), kwargs))
    args = with_positions(func, args)
    lazy = lazy_tensors((args, kwargs))
    if not lazy:
        return func(*args, **kwargs)
    join_transcripts(lazy)
    session = merge_sessions(lazy)
    if writes_to_real(func, args, kwargs):
        session.copy_before_write(kwargs.get("out", args[0]))
        args, kwargs = tree_map(materialize, (args, kwargs))
        return func(*args, **kwargs)
    run_awaited_updates((args, kwargs), session)
    found = repeat(func, args, kwargs, session)
    return record_new(func, args, kwargs, session) if found is NotImplemented else found


def record_new(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], session: Session) -> Any:
    """Record a call that was not seen before."""
    owners: dict[int, Tensor] = {}

    def to_fake(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        if isinstance(a, LazyTensor):
            owners[id(a._fake)] = a
            return a._fake
        if a.is_nested:  # its rows have sizes of their own, which no fake tensor has
            raise UnsupportedOperatorException(func)  # type: ignore[arg-type]
        fake = session.capture(a).fake
        owners[id(fake)] = a
        return fake

    log = begin_log(func, session)
    try:
        with logging_to(log):
            fake_args, fake_kwargs = tree_map(to_fake, (args, kwargs))
            given = None if log is None else given_arguments(fake_args, fake_kwargs, owners)
            out = record(session, func, fake_args, fake_kwargs)
        if log is not None:
            add_call(func, given, out, log, session)
    except WritesImage:
        return write_image(func, args, kwargs)
    except RuntimeError as error:
        if not needs_data(error):
            raise
        return call_materialized(func, args, kwargs)

    def to_lazy(o: Any) -> Any:
        if not isinstance(o, Tensor):
            return o
        if id(o) in owners:
            return owners[id(o)]
        return lazy_result(o, session)

    return tree_map(to_lazy, out)


def with_positions(func: Callable[..., Any], args: Any) -> Any:
    """Return the arguments of a call, with an index in its normal form; see `indices`."""
    if func is Tensor.__getitem__:
        return args[0], index_to_read(args[1], args[0])
    if func is Tensor.__setitem__:
        index, new = args[1], args[2]
        several = isinstance(new, Tensor) and new.numel() != 1
        if several:  # how many positions a mask has is known by its data only
            index = tree_map(lambda a: materialize(a) if is_lazy_mask(a) else a, index)
        return args[0], index_to_write(index, args[0], several or (isinstance(new, Tensor) and new.requires_grad)), new
    if func in INDEX_PUTS and len(args) > 1:
        return args[0], index_to_read(tuple(args[1]), args[0]), *args[2:]
    return args


def join_transcripts(lazy: Sequence[LazyTensor]) -> None:
    """Have the calls of lazy tensors' sessions compared with those of earlier steps, if these are their first."""
    sessions = [t._session.root() for t in lazy]
    if all(session.has_calls for session in sessions):
        return
    engine = next((session.engine for session in sessions if session.engine is not None), None)
    for session in dict.fromkeys(sessions):
        if not session.has_calls and engine is not None and engine.options.splitting is None:
            engine.transcripts.join(session)
        session.has_calls = True


def is_lazy_mask(a: Any) -> bool:
    return isinstance(a, LazyTensor) and a.dtype in MASK_DTYPES


def write_image(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call that writes into an image: it writes the tensor behind the image, as in PyTorch."""
    owners: dict[int, LazyTensor] = {}

    def own(a: Any) -> Any:
        found = tensor_of_image(a._session.root(), a._fake) if isinstance(a, LazyTensor) else None
        if found is None:
            return materialize(a)
        owners[id(found)] = a
        return found

    args, kwargs = tree_map(own, (args, kwargs))
    return tree_map(lambda o: owners.get(id(o), o), func(*args, **kwargs))


def call_materialized(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call that needs data on materialized tensors.

    Raises:
        RecordingError: The call has written to a map, that is, to its materialized copy.
    """
    copies: list[tuple[Tensor, Version | None]] = []

    def whole(a: Any) -> Any:
        found = materialize(a)
        if isinstance(a, LazyTensor) and a._value.is_map:
            copies.append((found, version(found)))
        return found

    args, kwargs = tree_map(whole, (args, kwargs))
    out = func(*args, **kwargs)
    if any(version(copy) != before for copy, before in copies):
        raise RecordingError(
            f"{call_label(func)} writes in place into a map and asks for the number that a tensor holds, which cannot "
            "be recorded: hand it the number (.item()), or use its form that returns a new tensor"
        )
    return out


def lazy_result(fake: Tensor, session: Session) -> LazyTensor:
    """Make the lazy tensor of a recorded result."""
    value = binding_of(fake)
    if not isinstance(value, Value):
        raise RecordingError("an operator returned a tensor that was not recorded")
    tensor: LazyTensor = LazyTensor._wrap(LazyTensor, fake, session, value.requires_grad)
    return tensor


# Attributes


#: Methods that need no data.
METADATA_METHODS = {
    getattr(Tensor, name)
    for name in (
        "size dim numel nelement element_size is_floating_point is_complex is_signed "
        "is_contiguous ndimension get_device storage_offset is_inference"
    ).split()
} | {torch.is_floating_point, torch.is_complex, torch.numel, Tensor.__len__}

#: Attributes that are views, as operators.
VIEW_ATTRIBUTES = {name: getattr(torch.ops.aten, name) for name in ("mT", "mH", "real", "imag")} | {
    "T": torch.ops.aten.numpy_T,
    "H": torch.ops.aten.matrix_H,
}


def read_attribute(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Read an attribute that needs no data; views of the tensor (``.T``, ``.mT``, ``.data``) are recorded."""
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    self = args[0]
    if name in VIEW_ATTRIBUTES:
        return record_call(VIEW_ATTRIBUTES[name], args, {})
    if name == "data":
        return self.detach()
    if name in AUTOGRAD_ATTRIBUTES:
        return read_autograd_attribute(self, name)
    with without_torch_function():
        return func(*args, **kwargs)


class RecordedGradFn:
    """The ``grad_fn`` of a recorded map that requires grad; it has no attributes."""

    def __getattr__(self, name: str) -> Any:
        raise no_gradient_error(f"'.grad_fn.{name}' of a recorded map was read (by a FLOP counter, say, or a hook)")


#: Attributes that belong to autograd.
AUTOGRAD_ATTRIBUTES = ("grad", "grad_fn", "is_leaf", "requires_grad")


def read_autograd_attribute(self: LazyTensor, name: str) -> Any:
    """Read an attribute of autograd, of a computed vector, of a recorded value or of the tensor behind an image."""
    value = self._value
    real = computed_vector(self, value)
    if real is not None:
        return getattr(real, name)
    if name == "requires_grad":
        return value.requires_grad
    if name == "grad_fn" and value.requires_grad and not isinstance(self, LazyImage):
        return RecordedGradFn()
    if name == "is_leaf":
        return isinstance(self, LazyImage)
    source = getattr(self, "_source", None) if name == "grad" else None
    return source.tensor.grad if isinstance(source, TensorSource) else None


def write_attribute(func: Callable[..., Any], self: LazyTensor, value: Any) -> None:
    """Set an attribute of a vector, which is materialized, or of the tensor behind an image."""
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "requires_grad":
        self.requires_grad_(value)
    elif name == "grad" and isinstance(self, LazyImage) and isinstance(self._source, TensorSource):
        self._source.tensor.grad = materialize(value)
    elif not self._value.is_map:
        func(materialize(self), materialize(value))
    elif name == "data":
        if value.shape != self.shape or value.dtype != self.dtype:
            new = f"{tuple(value.shape)}, {value.dtype}"
            raise TypeError(f".data of shape {tuple(self.shape)}, {self.dtype}, was set to {new}")
        bind(self._fake, record_call(KeepGradient.apply, (self, value), {})._value)
    else:
        raise no_gradient_error(f"'.{name}' of a recorded map was set")


# Gradients


def _backward(
    self: LazyTensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    materialize(self).backward(
        materialize(gradient), retain_graph, create_graph, inputs=tree_map(_gradient_target, inputs)
    )


def _gradient_target(a: Any) -> Any:
    """Return the tensor that gets a gradient: a materialized vector, or the tensor behind an image."""
    if not isinstance(a, LazyTensor):
        return a
    if isinstance(a, LazyImage) and isinstance(a._source, TensorSource):
        return a._source.tensor
    if a._value.is_map:
        raise no_gradient_error("a gradient of a recorded map was asked for")
    return materialize(a)


def no_gradient_error(what: str) -> RecordingError:
    return RecordingError(
        f"{what}: it is never held whole, and neither is its gradient. Take it whole first: features = materialize(x); "
        "compute what follows from features, and ask for the gradient of features (this is how Grad-CAM works). The "
        "gradient of an image comes from LazyImage.from_tensor(t) with t.requires_grad_()."
    )


def shard_error() -> RecordingError:
    path = current_module()[1]
    part = f"the layer {path!r}" if path else "the module"
    return RecordingError(
        f"FSDP shards {part} of a TiledModule: it gathers the weights for one call, and tiles need them again later. "
        "Shard the wrapper as one group, fully_shard(TiledModule(net, ...)), and no layer of it; or have the engine "
        'stream the weights, TiledModule(net, parameters="host", ...).'
    )


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = tree_map(materialize, outputs)
    return torch.autograd.grad(outputs, tree_map(_gradient_target, inputs), *args, **kwargs)


def _autograd_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    tensors = tree_map(materialize, tensors)
    if kwargs.get("inputs") is not None:
        kwargs["inputs"] = tree_map(_gradient_target, kwargs["inputs"])
    torch.autograd.backward(tensors, tree_map(materialize, grad_tensors), *args, **kwargs)


def _requires_grad_(self: LazyTensor, requires_grad: bool = True) -> LazyTensor:
    if requires_grad == self.requires_grad:
        return self
    if isinstance(self, LazyImage) and isinstance(self._source, TensorSource):
        raise RecordingError("call requires_grad_() on the tensor before LazyImage.from_tensor(tensor)")
    if self._value.is_map:
        raise no_gradient_error("requires_grad_() was called on a recorded map")
    materialize(self).requires_grad_(requires_grad)
    return self


def _detach_(self: LazyTensor) -> LazyTensor:
    if isinstance(self, LazyImage):
        raise RecordingError("detach_() on an image would detach the tensor behind it: use detach()")
    if view_of(self._fake) is not None:
        raise RuntimeError("Can't detach views in-place. Use detach() instead.")
    if computed_vector(self, self._value) is not None:
        materialize(self).detach_()
    elif self.requires_grad:
        bind(self._fake, record_call(torch.ops.aten.detach.default, (self,), {})._value)
    return self


def materialize_rows(rows: LazyTensor, name: str, error: RecordingError) -> None:
    """Make a result with one row for each image an ordinary tensor; see [Note: rows]. Raise the error for maps."""
    session, value = rows._session.root(), rows._value
    if not session.is_row(value):
        raise error
    others = [t._value for t in session.alive if t is not rows]
    if any(value in node.inputs for node in ancestors(others)):
        raise no_gradient_error(f"{name}() was called on a recorded map that was read before")
    session.replace(rows, materialize(rows))


def _on_vector(name: str) -> Callable[..., Any]:
    """Return a handler that runs a method on the materialized vector, since it needs a place in autograd's graph."""

    def run(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        error = no_gradient_error(f"{name}() was called on a recorded map")
        if (state := fsdp_state(args)) is not None:
            error = shard_error()
            if not state._is_root:  # its weights are freed before the recorded calls run
                raise error
        if self._value.is_map:
            materialize_rows(self, name, error)
        return getattr(materialize(self), name)(*args, **kwargs)

    return run


#: Handlers of calls for gradients.
GRADIENT_HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.backward: _backward,
    torch.autograd.backward: _autograd_backward,
    torch.autograd.grad: _grad,
    Tensor.requires_grad_: _requires_grad_,
    Tensor.detach_: _detach_,
    torch.detach_: _detach_,
    **{
        getattr(Tensor, name): _on_vector(name)
        for name in ("retain_grad", "register_hook", "register_post_accumulate_grad_hook")
    },
}


# Others


def _on_materialized(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler that runs a function on materialized tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(materialize, (args, kwargs))
        return func(*args, **kwargs)

    return run


def _to(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
    """Change the device of an image's tiles; any other ``to`` is recorded."""
    if isinstance(self, LazyImage):
        device, dtype, _, memory_format = parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
        if dtype is None or dtype == self.dtype:
            if device is None or device == self.device:
                return (
                    self if memory_format is None else record_call(Tensor.to, (self,), {"memory_format": memory_format})
                )
            return type(self)(
                self._source, device=device, requires_grad=self.requires_grad, engine=self._session.engine
            )
    return record_call(Tensor.to, (self, *args), kwargs)


def _view_in_place(name: str) -> Callable[..., Any]:
    """Return a handler of a method that changes a tensor's shape in place: the tensor becomes a view of what it was."""

    def run(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, LazyImage):
            raise RecordingError(f"{name}_() would change the shape of the image itself: use {name}()")
        view = record_call(getattr(Tensor, name), (self, *args), kwargs)
        if isinstance(view, LazyTensor):
            take_metadata(self, view)
            return self
        return getattr(computed_or_same(self), f"{name}_")(*args, **kwargs)

    return run


def _refuse(what: str, way_out: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        path = current_module()[1]
        where = f" in '{path}'" if path else ""
        raise RecordingError(f"{what} on a lazy tensor{where} is not possible: {way_out}")

    return refuse


def _addbmm_in_place(self: LazyTensor, batch1: Tensor, batch2: Tensor, **kwargs: Any) -> Any:
    """Refuse what PyTorch does by resizing the tensor in place, to the size of the product."""
    if tuple(self.shape) != (batch1.shape[1], batch2.shape[2]):
        _refuse("addbmm_() with a product of another shape", "it cannot be resized. Use addbmm().")()
    return record_call(Tensor.addbmm_, (self, batch1, batch2), kwargs)


def _repr(self: LazyTensor, **kwargs: Any) -> str:
    value = binding_of(self._fake)
    if isinstance(value, Value) and (real := computed_vector(self, value)) is not None:
        return repr(real)
    if isinstance(value, Value) and not value.is_map:
        return repr(materialize(self))
    with without_torch_function():
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


def _unchanged(self: LazyTensor, *args: Any, **kwargs: Any) -> LazyTensor:
    return self


#: Handlers of functions that are not simply recorded.
HANDLERS: dict[Any, Callable[..., Any]] = {
    **{
        getattr(Tensor, name): _on_materialized(getattr(Tensor, name))
        for name in (
            "item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __contains__ "
            "__array__ __format__ is_nonzero nonzero allclose equal"
        ).split()
    },
    torch.allclose: _on_materialized(torch.allclose),
    torch.equal: _on_materialized(torch.equal),
    torch.is_nonzero: _on_materialized(torch.is_nonzero),
    torch.nonzero: _on_materialized(torch.nonzero),
    Tensor.__repr__: _repr,
    **GRADIENT_HANDLERS,
    Tensor.to: _to,
    Tensor.cuda: lambda self, device=None, **kw: _to(self, torch.device("cuda") if device is None else device),
    Tensor.pin_memory: _unchanged,
    Tensor.share_memory_: _unchanged,
    Tensor.is_pinned: lambda self, *a, **k: False,
    Tensor.is_shared: lambda self: False,
    **{
        getattr(Tensor, f"{name}_"): _view_in_place(name)
        for name in ("squeeze", "unsqueeze", "transpose", "t", "swapaxes", "swapdims", "as_strided")
    },
    Tensor.data_ptr: _refuse("data_ptr()", "it has no memory."),
    Tensor.untyped_storage: _refuse("untyped_storage()", "it has no memory."),
    Tensor.set_: _refuse("set_()", "it has no memory."),
    Tensor.resize_: _refuse("resize_()", "it has no memory."),
    Tensor.resize_as_: _refuse("resize_as_()", "it has no memory."),
    Tensor.addbmm_: _addbmm_in_place,
    shape_as_tensor: lambda self: torch.tensor(self.shape),
    make_dual: _refuse(
        "torch.autograd.forward_ad.make_dual()", "its tangent would be lost. Use backward or torch.autograd.grad."
    ),
    CheckpointFunction.apply: _refuse(
        "torch.utils.checkpoint with use_reentrant=True",
        "its computation is hidden from the recording. Pass use_reentrant=False.",
    ),
    BackwardHookFunction.apply: _refuse(
        "a full backward hook on a module",
        "it would need a whole map, and maps are held in tiles. Remove the hook (hooks on parameters work), or call "
        "the module on materialize(x), a map that is held whole.",
    ),
}
for _name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):

    def _factory(self: LazyTensor, *args: Any, _name: str = _name, **kwargs: Any) -> Tensor:
        kwargs.setdefault("dtype", self.dtype)
        kwargs.setdefault("device", self.device)
        return getattr(torch.empty(0), _name)(*args, **kwargs)

    HANDLERS[getattr(Tensor, _name)] = _factory
