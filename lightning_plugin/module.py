"""`TiledModule`: any module, run tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, wraps
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from lightning_plugin.capture.lazy import (
    LazyImage,
    LazyTensor,
    lazy_tensors,
    run_users_code,
)
from lightning_plugin.capture.session import ModuleCall
from lightning_plugin.engine import Engine
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.finite import NonFinite
from lightning_plugin.kept_calls import KeptCalls
from lightning_plugin.ops import has_gradients
from lightning_plugin.options import ModuleOptions, Options
from lightning_plugin.plan import Plan
from lightning_plugin.plans import Planner
from lightning_plugin.private import never_compiled, refuse_export, tree_map
from lightning_plugin.residency.homes import Initialize, build
from lightning_plugin.source import channels_lie_last


class OfModule:
    """Attribute of `nn.Module` that a `TiledModule` has in common with the wrapped module."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, tiled: TiledModule | None, kind: type) -> Any:
        return self if tiled is None else getattr(tiled.module, self.name)

    def __set__(self, tiled: TiledModule, value: Any) -> None:
        if "module" in vars(tiled):  # else `nn.Module.__init__` sets it
            setattr(tiled.module, self.name, value)


#: Methods of containers that Python looks up in the class.
CONTAINER_METHODS = (
    "__len__", "__iter__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__reversed__",
)  # fmt: skip


class TiledModule(nn.Module):
    """Wrapper that runs a module tile by tile, with the module's own parameters and results::

        tiled = TiledModule(net, budget="2GiB")   # or tiles=(8, 8)
        tiled(x).sum().backward()          # the values and gradients of net(x).sum().backward()

    Tensors with at least one spatial axis ``(N, C, *spatial)`` are tiled; arguments with fewer dimensions are passed on
    unchanged. An ordinary tensor as input gives ordinary tensors as results. A `LazyImage` gives lazy results, so that
    a loss on a map is computed tile by tile too. Each module's call runs by that module's options, also if several
    modules share an image; if one `TiledModule` calls another, the outer one's options apply.

    The options are those of `lightning_plugin.options.ModuleOptions`; ``plan`` is a plan to run, in place of a budget.

    The module is wrapped, not changed: its parameters, hooks and modes are the user's own, under the module's own names
    (``state_dict``, ``named_parameters``), and ``tiled.module`` is the module itself. Attributes, children and methods
    of the module are read, set and called through the wrapper. Such a method runs as in plain PyTorch, without tiles;
    hooks on forward belong to the one on which they are registered.
    """

    _parameters = OfModule()  # type: ignore[assignment]
    _buffers = OfModule()  # type: ignore[assignment]
    _modules = OfModule()  # type: ignore[assignment]
    _non_persistent_buffers_set = OfModule()  # type: ignore[assignment]
    _state_dict_hooks = OfModule()  # type: ignore[assignment]
    _state_dict_pre_hooks = OfModule()  # type: ignore[assignment]
    _load_state_dict_pre_hooks = OfModule()  # type: ignore[assignment]
    _load_state_dict_post_hooks = OfModule()  # type: ignore[assignment]
    training = OfModule()  # type: ignore[assignment]
    module: nn.Module
    engine: Engine

    #: Leave the wrapper out of module paths in plans and messages.
    wraps_only = True

    def __init__(self, module: nn.Module, *, plan: Plan | None = None, **options: Unpack[ModuleOptions]) -> None:
        super().__init__()
        parsed = replace(Options.parse(options), plan=plan)
        if scripted := [name for name, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)]:
            raise RecordingError(
                f"the module {scripted[0]!r} was scripted or traced by torch.jit, which hides its operators: give "
                "TiledModule the module itself, before torch.jit.script or torch.jit.trace"
            )
        vars(self).update(module=module, engine=Engine(Planner(parsed)))
        self._complete()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an object of the class that the user has named, since that of `class_for` cannot be imported."""
        kind = type(self)
        return make_empty, (kind.__base__ if "wrapped_class" in vars(kind) else kind,), self.__getstate__()

    def __setstate__(self, state: Any) -> None:
        if "module" not in state:  # 1.0 had the module as a child
            state = {"module": state["_modules"]["module"], **state}
        vars(self).update({k: v for k, v in state.items() if not isinstance(vars(TiledModule).get(k), OfModule)})
        self._complete()

    def _complete(self) -> None:
        """Set what follows from the module and the engine."""
        self.engine.module = self.module
        vars(self)["_kept_calls"] = KeptCalls(self.module, self.engine)
        self.__class__ = class_for(type(self), type(self.module))  # type: ignore[arg-type]  # mypy: classes have no hash

    #: `torch.compile` breaks the graph at this call and leaves it uncompiled.
    __call__ = never_compiled(nn.Module.__call__)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        refuse_export()
        if lazy_tensors((args, kwargs)):
            return self._record(args, kwargs, False)
        return self._kept_calls.run(args, kwargs, lambda: self._record(args, kwargs, True))

    def _record(self, args: Any, kwargs: Any, is_eager: bool) -> Any:
        """Record a call of the user's module, and run it if it is eager."""
        args, kwargs = tree_map(self._make_lazy, (args, kwargs))
        images = lazy_tensors((args, kwargs))
        call = ModuleCall(self.engine)
        for image in images:
            image._session.root().begin_call(call)

        def run() -> Any:
            try:
                return self.module(*args, **kwargs)
            finally:
                call.is_open = False

        return run_users_code(run, images, compute=is_eager)

    def __prepare_scriptable__(self) -> None:
        """Refuse `torch.jit.script`."""
        raise RecordingError(
            "torch.jit.script was called on a TiledModule, whose tiles depend on the size of each image and on the "
            "budget. Script the module within it, tiled.module, which has the same parameters."
        )

    def _make_lazy(self, a: Any) -> Any:
        # An integer tensor with three dimensions is a target (N, H, W), not an image with H channels.
        is_image = isinstance(a, Tensor) and (a.dim() > 3 or (a.dim() == 3 and has_gradients(a.dtype)))
        if is_image and not isinstance(a, LazyTensor):
            if not a.requires_grad and channels_lie_last(a.shape):
                return LazyImage.from_tensor(a.movedim(-1, 1), engine=self.engine).movedim(1, -1)
            return LazyImage.from_tensor(a, engine=self.engine)
        return a

    def build(
        self,
        weights: Mapping[str, Tensor] | None = None,
        initialize: Initialize | None = None,
    ) -> None:
        """Allocate and initialise a module that was made on the meta device, since it is too large for memory.

        The parameters live on the tier that the option ``parameters`` names, by default on the disk.

        Args:
            weights: Values by name; those of ``torch.load(..., mmap=True)`` are read one at a time.
            initialize: Called module by module if there are no weights; by default ``reset_parameters`` of each module.
        """
        options, homes = self.engine.options, self.engine.homes
        homes.folder = options.folder
        tier = "host" if options.parameters == "host" else "disk"
        build(self.module, homes, tier, weights, initialize)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step."""
        return self.engine.plan

    @property
    def non_finite(self) -> NonFinite | None:
        """The first non-finite result in the first step whose loss was not finite; None if there was no such step."""
        return self.engine.non_finite

    @property
    def peak_bytes(self) -> int:
        """The measured peak of the last step (from its forward until the next one's) on the device, in bytes."""
        return self.engine.peak_bytes

    # The wrapped module's attributes, children and state

    def __getattr__(self, name: str) -> Any:
        if "module" not in vars(self):
            raise AttributeError(name)
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self.module, name)

    def _is_own(self, name: str) -> bool:
        """True for an attribute of the wrapper; all others are the module's."""
        return "module" not in vars(self) or name in vars(self) or hasattr(type(self), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the wrapper, the module, which has the same name, and what is in it."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        self.module.apply(fn)
        fn(self)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self.module._apply(*args, **kwargs)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_parameter(*args, **kwargs)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_buffer(*args, **kwargs)

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        self.module.add_module(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)


def make_empty(kind: type[TiledModule]) -> TiledModule:
    """Return an object of a class that has no attributes yet, for `pickle` and `copy`."""
    return kind.__new__(kind)


@cache
def class_for(kind: type[Any], wrapped: type[Any]) -> type[TiledModule]:
    """Return the subclass of a kind of `TiledModule` whose ``forward`` has the signature of a wrapped class's.

    Trainers look for the names of arguments: Lightning's and most others in the module, Hugging Face's in its class,
    where it finds labels by the arguments' names, and those of question answering by the name of the class.
    """
    members: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__, "wrapped_class": wrapped}
    if kind.forward is TiledModule.forward:

        @wraps(wrapped.forward)
        def forward(self: TiledModule, *args: Any, **kwargs: Any) -> Any:
            return kind.forward(self, *args, **kwargs)

        members["forward"] = forward
    for name in CONTAINER_METHODS:
        if (method := getattr(wrapped, name, None)) is not None and not hasattr(kind, name):
            members[name] = of_module(method)
    return type(f"{kind.__name__}[{wrapped.__name__}]", (kind,), members)


def of_module(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `TiledModule` that calls a method of the wrapped module's class."""

    @wraps(method)
    def call(self: TiledModule, *args: Any) -> Any:
        return method(self.module, *args)

    return call
