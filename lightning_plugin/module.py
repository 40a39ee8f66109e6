"""`TiledModule`: any module, run tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from lightning_plugin.capture.lazy import LazyImage, LazyTensor, lazies, materialize_all, recording_eagerly
from lightning_plugin.capture.session import Call
from lightning_plugin.engine import Engine
from lightning_plugin.errors import RecordingError
from lightning_plugin.execute.finite import NonFinite
from lightning_plugin.graph import next_serial
from lightning_plugin.options import Options, Words
from lightning_plugin.plan import Plan
from lightning_plugin.plans import Planner
from lightning_plugin.private import never_compiled, tree_map
from lightning_plugin.residency.homes import Initialize, build
from lightning_plugin.source import channels_lie_last


class Signed:
    """A method of a `TiledModule` with the signature of the wrapped module's `forward`, which trainers look at."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def __get__(self, tiled: TiledModule | None, kind: type) -> Callable[..., Any]:
        return self.run if tiled is None else wraps(tiled.module.forward)(partial(self.run, tiled))


class TiledModule(nn.Module):
    """The same module, the same parameters, the same result, a tile at a time::

        tiled = TiledModule(net, budget="2GiB")   # or tiles=(8, 8)
        tiled(x).sum().backward()          # what net(x).sum().backward() computes

    Tensors with at least one spatial axis ``(N, C, *spatial)`` go in tiled; arguments with fewer dimensions go in as
    they are. Where the input was an ordinary tensor, so are the results; where it was a `LazyImage`, results are lazy,
    so that a loss on a map is computed tile by tile too. What a call records is run by the options of its module, also
    where several modules share an image; where one such module calls another, by those of the outer one.

    The options are those of `Options`; ``plan`` is a plan to run by, instead of a budget.

    The module is wrapped, not changed: its parameters, hooks and modes are the user's own. ``state_dict`` of the
    wrapper is the module's, key for key.
    """

    #: Paths in plans and messages are the wrapped module's own.
    wraps_only = True

    def __init__(self, module: nn.Module, *, plan: Plan | None = None, **options: Unpack[Words]) -> None:
        super().__init__()
        found = replace(Options.parse(options), plan=plan)
        if scripted := [name for name, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)]:
            raise RecordingError(
                f"the module {scripted[0]!r} was scripted or traced by torch.jit, which hides its operators: give "
                "TiledModule the module itself, before torch.jit.script or torch.jit.trace"
            )
        self.module = module
        self.engine = Engine(Planner(found))

    #: Under `torch.compile` the module is called as ever, between two graphs.
    __call__ = never_compiled(nn.Module.__call__)

    @Signed
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        gather = not lazies((args, kwargs))
        args, kwargs = tree_map(self._lazy, (args, kwargs))
        call = Call(self.engine)
        for lazy in lazies((args, kwargs)):
            lazy._session.root().enter(call)
        try:
            with recording_eagerly():
                out = self.module(*args, **kwargs)
        finally:
            call.end = next_serial()
        return materialize_all(out) if gather else out

    def _lazy(self, a: Any) -> Any:
        # A tensor of whole numbers with three dimensions is a target (N, H, W), not an image of H channels.
        image = isinstance(a, Tensor) and (a.dim() > 3 or (a.dim() == 3 and a.is_floating_point()))
        if image and not isinstance(a, LazyTensor):
            if not a.requires_grad and channels_lie_last(a.shape):
                return LazyImage.from_tensor(a.movedim(-1, 1), engine=self.engine).movedim(1, -1)
            return LazyImage.from_tensor(a, engine=self.engine)
        return a

    def build(
        self,
        weights: Mapping[str, Tensor] | None = None,
        initialize: Initialize | None = None,
    ) -> None:
        """Give memory to a module that was made on the meta device because it is too large, below the device: on the
        tier that the option ``parameters`` names, the disk if it names none. Values come from ``weights``, by name (a
        checkpoint that ``torch.load(..., mmap=True)`` maps is not held), else from ``initialize``, called module by
        module, else from each module's ``reset_parameters``."""
        options, homes = self.engine.options, self.engine.homes
        homes.folder = options.folder
        tier = "host" if options.parameters == "host" else "disk"
        build(self.module, homes, tier, weights, initialize)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last execution."""
        return self.engine.plan

    @property
    def non_finite(self) -> NonFinite | None:
        """In the first step whose loss was not finite, what was the first not to be."""
        return self.engine.non_finite

    @property
    def peak_bytes(self) -> int:
        """Bytes that the last step (from its forward on, until the next) held on the device at its worst moment."""
        return self.engine.peak_bytes

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)
