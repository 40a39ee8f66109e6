"""Tensors without storage: `LazyTensor`, and `LazyImage`, the one a user makes.

A lazy tensor answers what can be answered without data (shape, dtype, device, requires_grad), records every operator
that is called on it (see `record`), and is *executed* when a value is needed: ``item``, ``bool``, printing,
``backward``, a write into a real tensor. A vector that was executed is an ordinary tensor from then on.

The file is long because the class and what it answers calls with name each other: attributes, methods that execute, and
those that are refused all make or take lazy tensors, and the class looks them up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_plugin.capture.alias import current, remember_storage
from lightning_plugin.capture.buffers import settle_buffers
from lightning_plugin.capture.masks import without_masks
from lightning_plugin.capture.paths import label
from lightning_plugin.capture.record import Recorder, record
from lightning_plugin.capture.run import execute
from lightning_plugin.capture.session import Session, bind, bound
from lightning_plugin.errors import RecordingError
from lightning_plugin.graph import Value
from lightning_plugin.ops import Autocast
from lightning_plugin.private import NEEDS_DATA, collate_first, parse_to, plain, without_storage
from lightning_plugin.rules.replaced import replaced
from lightning_plugin.source import TensorSource, TileSource, batch, likely_instances
from lightning_plugin.trees import tree_leaves, tree_map


class LazyTensor(Tensor):
    """A recorded result. Not made by users; see `LazyImage`."""

    _fake: Tensor
    _session: Session

    @staticmethod
    def _wrap(cls: type, fake: Tensor, session: Session, requires_grad: bool) -> Any:
        grad = requires_grad and (fake.is_floating_point() or fake.is_complex())
        self = without_storage(cls, fake, grad)
        self._fake = fake
        self._session = session
        session.tensors.append(weakref.ref(self))
        return self

    @property
    def _value(self) -> Value:
        """Its value as it is now, after all that was written to it through other tensors."""
        return self._current("this call")

    def _current(self, user: str, func: Callable[..., Any] | None = None) -> Value:
        state = bound(self._fake)
        if isinstance(state, Value):
            return state
        recorder = Recorder(self._session.root(), func or Tensor.view, Autocast.now(self._fake.device))
        return current(self._fake, user, recorder)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        special = SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func in READS or name == "__get__":
            return read_attribute(func, args, kwargs)
        if name == "__set__":
            return write_attribute(func, *args)
        return call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def,override]
        if func is torch.ops.aten.detach.default:
            return args[0].detach() if not isinstance(args[0], LazyTensor) else args[0]
        raise RecordingError(
            f"{func} reached a lazy tensor below the level at which calls are recorded: from torch.func (vmap, grad, "
            "jvp, …), a custom autograd.Function or a compiled extension. Use the batched form of the operator, run "
            "that part on materialize(x), a map that is held whole, or give it a rule."
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
        collate_first(LazyImage, collate_images)
        shape = tuple(source.shape)
        if len(shape) < 3:
            raise ValueError(f"an image is (N, C, *spatial) with at least one spatial axis, got shape {shape}")
        target = torch.device(device) if device is not None else torch.device("cpu")
        session = Session(execute, settings, target)
        with session.mode:
            fake = torch.empty(shape, dtype=source.dtype, device=target)
        self = LazyTensor._wrap(cls, fake, session, requires_grad)
        self._source = source
        session.image(source, fake, requires_grad)
        remember_storage(session, fake)
        return self

    def _current(self, user: str, func: Callable[..., Any] | None = None) -> Value:
        """The image as it is now: if its source has changed since it was last looked at, it is another value."""
        value = super()._current(user, func)
        session = self._session.root()
        image = session.bindings.images.get(value)
        if image is not None and image.changed:
            return session.image(self._source, self._fake, value.requires_grad)
        return value

    @classmethod
    def from_tensor(
        cls, tensor: Tensor, *, device: torch.device | str | None = None, settings: Any = None
    ) -> LazyImage:
        """An image that is in memory already; it stays where it is and is moved tile by tile.

        A tensor that requires grad gets its gradient.
        """
        if isinstance(tensor, LazyImage):
            return tensor
        source = TensorSource(tensor, likely_instances(tensor.shape))
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
    self = args[0]
    if name in ("T", "mT", "H", "mH", "real", "imag"):
        order = list(range(self.dim()))
        if name in ("T", "H"):
            order.reverse()
        elif name in ("mT", "mH"):
            order[-2:] = order[:-3:-1]
        return self.permute(order) if name not in ("real", "imag") else self
    if name == "data":
        return self.detach()
    if name in HISTORY:
        return history(self, name)
    with plain():
        return func(*args, **kwargs)


#: What autograd knows of a tensor.
HISTORY = ("grad", "grad_fn", "is_leaf", "requires_grad")


def history(self: LazyTensor, name: str) -> Any:
    """What autograd knows of an image's tensor, of a small value that was computed, or of what is still recorded."""
    foreign(self)
    value = self._value
    real = computed(self, value)
    if real is not None:
        return getattr(real, name)
    if name == "requires_grad":
        return value.requires_grad
    if name == "is_leaf":
        return isinstance(self, LazyImage)
    source = getattr(self, "_source", None) if name == "grad" else None
    return source.tensor.grad if isinstance(source, TensorSource) else None


def write_attribute(func: Callable[..., Any], self: LazyTensor, value: Any) -> None:
    """Set what a real tensor has: of a small value, which is computed for it, or of an image's own tensor."""
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "requires_grad":
        self.requires_grad_(value)
    elif name == "grad" and isinstance(self, LazyImage) and isinstance(self._source, TensorSource):
        self._source.tensor.grad = _real(value)
    elif not self._value.is_map:
        func(materialize(self), _real(value))
    elif name == "data":
        bind(self._fake, replaced(self, value)._value)  # type: ignore[attr-defined]
    else:
        raise no_gradient(f"'.{name}' of a recorded map was set")


# Recording -----------------------------------------------------------------------------------------------------------


def lazies(tree: Any) -> list[LazyTensor]:
    return [a for a in tree_leaves(tree) if isinstance(a, LazyTensor)]


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
        real = computed(value, value._current(label(func) if func else "this call", func))
        return value if real is None else real
    return value


def computed(tensor: LazyTensor, value: Value) -> Tensor | None:
    """What a small value has become, if it was computed."""
    return tensor._session.root().vectors.get(value)


def foreign(tensor: LazyTensor, func: Callable[..., Any] | None = None) -> None:
    """Refuse a lazy tensor that went through a custom autograd.Function, which cannot be recorded."""
    with plain():
        function = tensor.grad_fn
    if function is None:
        return
    name = function.name().removesuffix("Backward")
    large = isinstance(bound(tensor._fake), Value) and tensor._value.is_map
    whole = "materialize(x), a map that is held whole" if large else "materialize(x), its small input computed first"
    if name == "BackwardHookFunction":
        what = "a full backward hook on a module"
        way_out = f"Remove the hook (hooks on parameters work), or call the module on {whole}."
    else:
        what, way_out = (
            f"the custom autograd function {name}",
            f"Write it with ordinary operators, or apply it to {whole}.",
        )
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
    if func is Tensor.__getitem__:
        args = args[0], without_masks(args[1])
    waiting = lazies((args, kwargs))
    if not waiting:
        return func(*args, **kwargs)
    if writes_to_real(func, args, kwargs):
        args, kwargs = tree_map(_real, (args, kwargs))
        return func(*args, **kwargs)
    session = session_of(waiting)
    settle_buffers((args, kwargs), session)
    owners: dict[int, LazyTensor] = {}

    def to_fake(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        if isinstance(a, LazyTensor):
            owners[id(a._fake)] = a
            return a._fake
        fake = session.capture(a).fake
        captured[id(fake)] = a
        return fake

    captured: dict[int, Tensor] = {}
    fake_args, fake_kwargs = tree_map(to_fake, (args, kwargs))
    try:
        out = record(session, func, fake_args, fake_kwargs)
    except NEEDS_DATA:
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
    session = tensor._session.root()
    if value in session.vectors:
        return session.vectors[value]
    result = session.run(value)
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
    real.backward(gradient=_real(gradient), retain_graph=retain_graph, inputs=tree_map(_differentiated, inputs))


def _differentiated(a: Any) -> Any:
    """What a gradient is asked of: a small value that was recorded, or the tensor that an image lies in."""
    if not isinstance(a, LazyTensor):
        return a
    if isinstance(a, LazyImage) and isinstance(a._source, TensorSource):
        return a._source.tensor
    if a._value.is_map:
        raise no_gradient("a gradient was asked of a recorded map")
    return materialize(a)


def no_gradient(what: str) -> RecordingError:
    return RecordingError(
        f"{what}: it is never held whole, and neither is its gradient. Take it whole first: features = materialize(x); "
        "compute what follows from features, and ask for the gradient of features (this is how Grad-CAM works). The "
        "gradient of an image comes from LazyImage.from_tensor(t) with t.requires_grad_()."
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
    outputs = tree_map(_real, outputs)
    return torch.autograd.grad(outputs, tree_map(_differentiated, inputs), *args, **kwargs)


def _autograd_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    first_order(kwargs.get("create_graph", args[1] if len(args) > 1 else False))
    tensors = tree_map(_real, tensors)
    if kwargs.get("inputs") is not None:
        kwargs["inputs"] = tree_map(_differentiated, kwargs["inputs"])
    torch.autograd.backward(tensors, tree_map(_real, grad_tensors), *args, **kwargs)


def _to(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
    """Moving an image moves where its tiles go; anything else about ``to`` is an operator."""
    if isinstance(self, LazyImage):
        device, dtype, _, memory_format = parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
        if dtype is None or dtype == self.dtype:
            if device is None or device == self.device:
                return self if memory_format is None else call(Tensor.to, (self,), {"memory_format": memory_format})
            return type(self)(
                self._source, device=device, requires_grad=self.requires_grad, settings=self._session.settings
            )
    return call(Tensor.to, (self, *args), kwargs)


def _requires_grad_(self: LazyTensor, requires_grad: bool = True) -> LazyTensor:
    if requires_grad == self.requires_grad:
        return self
    if isinstance(self, LazyImage) and isinstance(self._source, TensorSource):
        raise RecordingError("call requires_grad_() on the tensor before LazyImage.from_tensor(tensor)")
    if self._value.is_map:
        raise no_gradient("requires_grad_() was called on a recorded map")
    materialize(self).requires_grad_(requires_grad)
    return self


def _of_small(name: str) -> Callable[..., Any]:
    """A method that needs a tensor's place in autograd's graph: a small value is computed for it."""

    def run(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        if self._value.is_map:
            raise no_gradient(f"{name}() was called on a recorded map")
        return getattr(materialize(self), name)(*args, **kwargs)

    return run


def _refuse(what: str, way_out: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RecordingError(f"{what} on a lazy tensor is not possible: {way_out}")

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
    **{
        getattr(Tensor, name): _of_small(name)
        for name in ("retain_grad", "register_hook", "register_post_accumulate_grad_hook")
    },
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


def collate_images(images: list[LazyImage], *, collate_fn_map: Any = None) -> LazyImage:
    """What `torch.utils.data.default_collate` does with images: a batch of them, still unread."""
    first = images[0]
    # Images out of a dataset carry no batch dimension of their own beyond the leading one of their source.
    source = batch([image.source for image in images])
    grad = any(image.requires_grad for image in images)
    return LazyImage(source, device=first.device, requires_grad=grad, settings=first._session.root().settings)
