"""`TiledModule`: any module, run tile by tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, wraps
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from lightning_plugin.capture.lazy import (
    LazyImage,
    LazyTensor,
    lazy_tensors,
    materialize_all,
    undone_if_refused,
    without_compiled_modules,
)
from lightning_plugin.capture.session import ModuleCall
from lightning_plugin.engine import Engine
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.finite import NonFinite
from lightning_plugin.graph import next_serial
from lightning_plugin.ops import has_gradients
from lightning_plugin.options import ModuleOptions, Options
from lightning_plugin.plan import Plan
from lightning_plugin.plans import Planner
from lightning_plugin.private import never_compiled, tree_map
from lightning_plugin.residency.homes import Initialize, build
from lightning_plugin.source import channels_lie_last


class TiledModule(nn.Module):
    """Wrapper that runs a module tile by tile, with the module's own parameters and results::

        tiled = TiledModule(net, budget="2GiB")   # or tiles=(8, 8)
        tiled(x).sum().backward()          # the values and gradients of net(x).sum().backward()

    Tensors with at least one spatial axis ``(N, C, *spatial)`` are tiled; arguments with fewer dimensions are passed on
    unchanged. An ordinary tensor as input gives ordinary tensors as results. A `LazyImage` gives lazy results, so that
    a loss on a map is computed tile by tile too. Each module's call runs by that module's options, also if several
    modules share an image; if one `TiledModule` calls another, the outer one's options apply.

    The options are those of `lightning_plugin.options.ModuleOptions`; ``plan`` is a plan to run, in place of a budget.

    The module is wrapped, not changed: its parameters, hooks and modes are the user's own. ``state_dict`` of the
    wrapper is the module's, key for key.
    """

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
        self.module = module
        self.engine = Engine(Planner(parsed))
        self._set_class()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an object of the class that the user has named, since that of `class_for` cannot be imported."""
        kind = type(self)
        return make_empty, (kind.__base__ if "wrapped_class" in vars(kind) else kind,), self.__getstate__()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._set_class()

    def _set_class(self) -> None:
        self.__class__ = class_for(type(self), type(self.module))  # type: ignore[arg-type]  # mypy: classes have no hash

    #: `torch.compile` breaks the graph at this call and leaves it uncompiled.
    __call__ = never_compiled(nn.Module.__call__)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_eager = not lazy_tensors((args, kwargs))
        args, kwargs = tree_map(self._make_lazy, (args, kwargs))
        images = lazy_tensors((args, kwargs))
        with undone_if_refused(images):
            call = ModuleCall(self.engine)
            for image in images:
                image._session.root().begin_call(call)
            try:
                with without_compiled_modules():
                    out = self.module(*args, **kwargs)
            finally:
                call.end = next_serial()
            return materialize_all(out) if is_eager else out

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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


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
    return type(f"{kind.__name__}[{wrapped.__name__}]", (kind,), members)
