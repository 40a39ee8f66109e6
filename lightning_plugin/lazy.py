"""Tensors without storage: `LazyTensor`, and `LazyImage`, the one a user makes.

A lazy tensor answers what can be answered without data (shape, dtype, device, requires_grad), records every operator
that is called on it (see `record`), and is *executed* when a value is needed: ``item``, ``bool``, printing,
``backward``, a write into a real tensor. A vector that was executed is an ordinary tensor from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Value
from lightning_plugin.record import Session, Stale, bound, label, record, remember_storage, source_value, stale
from lightning_plugin.source import BatchSource, TensorSource, TileSource

_plain = torch._C.DisableTorchFunctionSubclass


class LazyTensor(Tensor):
    """A recorded result. Not made by users; see `LazyImage`."""

    _fake: Tensor
    _session: Session

    @staticmethod
    def _wrap(cls: type, fake: Tensor, session: Session, requires_grad: bool) -> Any:
        self: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            fake.shape,
            strides=fake.stride(),
            dtype=fake.dtype,
            device=fake.device,
            requires_grad=requires_grad and (fake.is_floating_point() or fake.is_complex()),
        )
        self._fake = fake
        self._session = session
        session.tensors.append(weakref.ref(self))
        return self

    @property
    def _value(self) -> Value:
        value = bound(self._fake)
        if isinstance(value, Stale):
            raise stale(value, "this call")
        if value is None:
            raise RecordingError("a lazy tensor that belongs to no recording was used; make it with LazyImage(source)")
        return value

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        special = SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if func in READS or getattr(func, "__name__", "") == "__get__":
            return read_attribute(func, args, kwargs)
        return call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def,override]
        if func is torch.ops.aten.detach.default:
            return args[0].detach() if not isinstance(args[0], LazyTensor) else args[0]
        raise RecordingError(
            f"{func} reached a lazy tensor below the level at which calls are recorded, most likely from a custom "
            "autograd.Function or a compiled extension. Run that part outside the recorded model, or give it a rule."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RecordingError(
            "a recorded tensor cannot be pickled or copied: it has no data yet. Take its value first (.item(), "
            "materialize(...)), or detach what you want to keep."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return self.detach().clone()


class LazyImage(LazyTensor):
    """An image of any size, as a tensor ``(N, C, *spatial)`` that holds no pixels.

    ``source`` is a `TileSource`; its tiles are moved to ``device`` as they are read::

        image = LazyImage(source)
        loss = model(image).sum()      # records; nothing is read, nothing is allocated
        loss.backward()                # runs tile by tile
    """

    _source: TileSource

    def __new__(
        cls,
        source: TileSource | Tensor,
        *,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        settings: Any = None,
    ) -> LazyImage:
        if isinstance(source, Tensor):
            return cls.from_tensor(source, device=device, settings=settings)
        shape = tuple(source.shape)
        if len(shape) < 3:
            raise ValueError(f"an image is (N, C, *spatial) with at least one spatial axis, got shape {shape}")
        target = torch.device(device) if device is not None else torch.device("cpu")
        value = source_value(source, target, requires_grad)
        self = LazyTensor._wrap(cls, value.fake, Session(settings, target), requires_grad)
        self._source = source
        self._session.nodes.append(value.node)
        remember_storage(self._session, value.fake)
        return self

    @classmethod
    def from_tensor(
        cls, tensor: Tensor, *, device: torch.device | str | None = None, settings: Any = None
    ) -> LazyImage:
        """An image that is in memory already; it stays where it is and is moved tile by tile.

        A tensor that requires grad gets its gradient.
        """
        if isinstance(tensor, LazyImage):
            return tensor
        source = TensorSource(tensor)
        return cls(source, device=device or tensor.device, requires_grad=tensor.requires_grad, settings=settings)

    @property
    def source(self) -> TileSource:
        return self._source

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild_image, (type(self), self._source, str(self.device), self.requires_grad)

    def __deepcopy__(self, memo: Any) -> LazyImage:
        return self


def _rebuild_image(cls: type[LazyImage], source: TileSource, device: str, requires_grad: bool) -> LazyImage:
    return cls(source, device=device, requires_grad=requires_grad)


# Reading without executing -------------------------------------------------------------------------------------------

READS = {
    getattr(Tensor, name)
    for name in (
        "size dim stride numel nelement element_size is_floating_point is_complex is_signed "
        "is_contiguous ndimension get_device storage_offset is_inference"
    ).split()
} | {torch.is_floating_point, torch.is_complex, torch.numel, Tensor.__len__}
READS.discard(Tensor.stride)


def read_attribute(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """An attribute that needs no data; one that is a view of the tensor (``.T``, ``.mT``, ``.data``) is recorded."""
    owner = getattr(func, "__self__", None)
    name = getattr(owner, "__name__", "")
    if name in ("T", "mT", "H", "mH", "real", "imag"):
        order = list(range(args[0].dim()))
        if name in ("T", "H"):
            order.reverse()
        elif name in ("mT", "mH"):
            order[-2:] = order[:-3:-1]
        return args[0].permute(order) if name not in ("real", "imag") else args[0]
    if name == "data":
        return args[0].detach()
    if name == "grad_fn":
        foreign(args[0])
        return None
    if name == "is_leaf":
        return isinstance(args[0], LazyImage)
    if name == "grad":
        source = getattr(args[0], "_source", None)
        return source.tensor.grad if isinstance(source, TensorSource) else None
    with _plain():
        return func(*args, **kwargs)


# Recording -----------------------------------------------------------------------------------------------------------


def lazies(tree: Any) -> list[LazyTensor]:
    return [a for a in tree_flatten(tree)[0] if isinstance(a, LazyTensor)]


def session_of(tensors: Iterable[LazyTensor]) -> Session:
    """The one recording that tensors belong to; recordings that meet become one."""
    sessions = [t._session.root() for t in tensors]
    first = sessions[0]
    for other in sessions[1:]:
        first.absorb(other.root())
    return first


def known(value: Any, func: Callable[..., Any] | None = None) -> Any:
    """A lazy vector that was executed, as the tensor it has become; anything else unchanged."""
    if isinstance(value, LazyTensor):
        foreign(value, func)
        if isinstance(state := bound(value._fake), Stale):
            raise stale(state, label(func) if func else "this call")
        real = value._value.real
        return value if real is None else real
    return value


def foreign(tensor: LazyTensor, func: Callable[..., Any] | None = None) -> None:
    """Refuse a lazy tensor that went through a custom autograd.Function, which cannot be recorded."""
    with _plain():
        function = tensor.grad_fn
    if function is None:
        return
    name = function.name().removesuffix("Backward")
    if name == "BackwardHookFunction":
        what, way_out = "a full backward hook on a module", "Remove the hook; hooks on parameters work."
    else:
        what = f"the custom autograd function {name}"
        way_out = "Write it with ordinary operators, or run that part on materialize(x), a map that is held whole."
    raise RecordingError(
        f"a lazy tensor went through {what} before {label(func) if func else 'it was used'}. That hides the "
        f"computation from the recording. {way_out}"
    )


def writes_to_real(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a call would write lazy values into an ordinary tensor."""
    name = getattr(func, "__name__", "")
    inplace = (name.endswith("_") and not name.endswith("__")) or name in INPLACE_DUNDERS
    first = args[0] if args else None
    out = kwargs.get("out")
    return (inplace and isinstance(first, Tensor) and not isinstance(first, LazyTensor)) or (
        isinstance(out, Tensor) and not isinstance(out, LazyTensor)
    )


INPLACE_DUNDERS = {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__",
    "__ixor__", "__ilshift__", "__irshift__", "__setitem__",
}  # fmt: skip


def call(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Record a call, or run it where all it needs is known."""
    args, kwargs = tree_map(lambda a: known(a, func), (tuple(args), kwargs))
    waiting = lazies((args, kwargs))
    if not waiting:
        return func(*args, **kwargs)
    if writes_to_real(func, args, kwargs):
        args, kwargs = tree_map(_real, (args, kwargs))
        return func(*args, **kwargs)
    session = session_of(waiting)
    owners: dict[int, LazyTensor] = {}

    def to_fake(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        if isinstance(a, LazyTensor):
            a._value  # noqa: B018  a stale tensor is refused here
            owners[id(a._fake)] = a
            return a._fake
        fake = session.capture(a).fake
        captured[id(fake)] = a
        return fake

    captured: dict[int, Tensor] = {}
    fake_args, fake_kwargs = tree_map(to_fake, (args, kwargs))
    try:
        out = record(session, func, fake_args, fake_kwargs)
    except (
        torch._subclasses.fake_tensor.DynamicOutputShapeException,
        torch._subclasses.fake_tensor.DataDependentOutputException,
    ):
        args, kwargs = tree_map(_real, (args, kwargs))
        return func(*args, **kwargs)

    def to_lazy(o: Any) -> Any:
        if not isinstance(o, Tensor):
            return o
        if id(o) in owners:
            return owners[id(o)]
        if id(o) in captured:
            return captured[id(o)]
        return lazy(o, session)

    return tree_map(to_lazy, out)


def lazy(fake: Tensor, session: Session) -> LazyTensor:
    """The lazy tensor of a recorded result."""
    value = bound(fake)
    if not isinstance(value, Value):
        raise RecordingError("an operator returned a tensor that was not recorded")
    tensor = LazyTensor._wrap(LazyTensor, fake, session, value.requires_grad)
    if not value.is_map:
        session.pending.append(weakref.ref(tensor))
    return tensor


# Executing -----------------------------------------------------------------------------------------------------------


def materialize(tensor: Tensor) -> Tensor:
    """The ordinary tensor of a lazy one: computes it, and whatever small is waiting beside it, under one plan.

    A map is gathered whole on its device; do this only with maps that fit.
    """
    if not isinstance(tensor, LazyTensor):
        return tensor
    foreign(tensor)
    value = tensor._value
    if value.real is not None:
        return value.real
    from lightning_plugin.execute.run import execute

    session = tensor._session.root()
    waiting = [ref() for ref in session.pending]
    session.pending = [ref for ref in session.pending if ref() is not None]
    others = [t._value for t in waiting if t is not None and isinstance(bound(t._fake), Value)]
    result = execute(session, value, [v for v in others if v.real is None])
    session.forget()
    return result


def _real(a: Any) -> Any:
    return materialize(a) if isinstance(a, LazyTensor) else a


def _executed(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that needs data: run on the real tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_real, (args, kwargs))
        return func(*args, **kwargs)

    return run


def _backward(
    self: LazyTensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    first_order(create_graph)
    real = materialize(self)
    real.backward(gradient=_real(gradient), retain_graph=retain_graph, inputs=_real_inputs(inputs))


def _real_inputs(inputs: Any) -> Any:
    return tree_map(
        lambda a: a._source.tensor if isinstance(a, LazyImage) and isinstance(a._source, TensorSource) else a, inputs
    )


def first_order(create_graph: bool) -> None:
    """Refuse gradients of gradients."""
    if create_graph:
        raise RecordingError(
            "backward with create_graph=True was asked of a tiled computation: gradients of gradients would need every "
            "tile at once. Compute the penalty on a crop with plain PyTorch instead."
        )


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    first_order(kwargs.get("create_graph", args[2] if len(args) > 2 else False))
    return torch.autograd.grad(tree_map(_real, outputs), _real_inputs(inputs), *args, **kwargs)


def _autograd_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    first_order(kwargs.get("create_graph", args[1] if len(args) > 1 else False))
    torch.autograd.backward(tree_map(_real, tensors), tree_map(_real, grad_tensors), *args, **kwargs)


def _to(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
    """Moving an image moves where its tiles go; anything else about ``to`` is an operator."""
    if isinstance(self, LazyImage):
        device, dtype, _, memory_format = torch._C._nn._parse_to(
            *args, **{k: v for k, v in kwargs.items() if k != "copy"}
        )
        if dtype is None or dtype == self.dtype:
            if device is None or device == self.device:
                return self if memory_format is None else call(Tensor.to, (self,), {"memory_format": memory_format})
            return type(self)(
                self._source, device=device, requires_grad=self.requires_grad, settings=self._session.settings
            )
    return call(Tensor.to, (self, *args), kwargs)


def _requires_grad_(self: LazyTensor, requires_grad: bool = True) -> LazyTensor:
    if not requires_grad and not self.requires_grad:
        return self
    if isinstance(self, LazyImage) and isinstance(self._source, TensorSource):
        raise RecordingError("call requires_grad_() on the tensor before LazyImage.from_tensor(tensor)")
    raise RecordingError(
        "requires_grad_() on a recorded tensor: its gradient is never held. Gradients with respect to an image come "
        "from LazyImage.from_tensor(t) with t.requires_grad_()."
    )


def _refuse(what: str, way_out: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RecordingError(f"{what} on a lazy tensor is not possible: {way_out}")

    return refuse


def _representation(self: LazyTensor, **kwargs: Any) -> str:
    value = bound(self._fake)
    if isinstance(value, Value) and value.real is not None:
        return repr(value.real)
    if isinstance(value, Value) and not value.is_map:
        return repr(materialize(self))
    with _plain():
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


def _same(self: LazyTensor, *args: Any, **kwargs: Any) -> LazyTensor:
    return self


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
    Tensor.backward: _backward,
    torch.autograd.backward: _autograd_backward,
    torch.autograd.grad: _grad,
    Tensor.to: _to,
    Tensor.cuda: lambda self, device=None, **kw: _to(self, torch.device("cuda") if device is None else device),
    Tensor.requires_grad_: _requires_grad_,
    Tensor.pin_memory: _same,
    Tensor.share_memory_: _same,
    Tensor.is_pinned: lambda self, *a, **k: False,
    Tensor.is_shared: lambda self: False,
    Tensor.retain_grad: _refuse("retain_grad()", "the gradient of a recorded tensor is never held whole."),
    Tensor.register_hook: _refuse(
        "register_hook()", "hooks on parameters work; a hook on a recorded tensor would have to see it whole."
    ),
    Tensor.data_ptr: _refuse("data_ptr()", "it has no memory."),
    Tensor.untyped_storage: _refuse("untyped_storage()", "it has no memory."),
    Tensor.set_: _refuse("set_()", "it has no memory."),
    Tensor.resize_: _refuse("resize_()", "it has no memory."),
}
for _name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):

    def _factory(self: LazyTensor, *args: Any, _name: str = _name, **kwargs: Any) -> Tensor:
        kwargs.setdefault("dtype", self.dtype)
        kwargs.setdefault("device", self.device)
        return getattr(torch.empty(0), _name)(*args, **kwargs)

    SPECIAL[getattr(Tensor, _name)] = _factory


def collate_images(batch: list[LazyImage], *, collate_fn_map: Any = None) -> LazyImage:
    """What `torch.utils.data.default_collate` does with images: a batch of them, still unread."""
    images: list[TileSource] = []
    for image in batch:
        source = image._source
        images.append(source)
    # Images out of a dataset carry no batch dimension of their own beyond the leading one of their source.
    return LazyImage(BatchSource(tuple(images)))


def _register_collation() -> None:
    from torch.utils.data._utils.collate import default_collate_fn_map

    # The map is searched in order with isinstance, so the more special type has to come before Tensor.
    entries = dict(default_collate_fn_map)
    default_collate_fn_map.clear()
    default_collate_fn_map[LazyImage] = collate_images
    default_collate_fn_map.update(entries)


_register_collation()
