"""`TiledModule`: any module, run tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_plugin.capture.eager import recording_eagerly
from lightning_plugin.capture.lazy import LazyImage, LazyTensor, materialize
from lightning_plugin.plan import Plan
from lightning_plugin.settings import Settings
from lightning_plugin.units import parse_bytes


class TiledModule(nn.Module):
    """The same module, the same parameters, the same result, a tile at a time::

        tiled = TiledModule(net, budget="2GiB")   # or tiles=(8, 8)
        tiled(x).sum().backward()          # what net(x).sum().backward() computes

    Tensors with at least one spatial axis ``(N, C, *spatial)`` go in tiled; arguments with fewer dimensions go in as
    they are. Where the input was an ordinary tensor, so are the results; where it was a `LazyImage`, results are lazy,
    so that a loss on a map is computed tile by tile too.

    ``halo`` says what neighbouring tiles do about the rows between them ("recompute", "share", or "auto" for what is
    faster), ``policy`` restricts the planner to a published technique, for comparison. ``half=True`` is an
    approximation: maps that leave the device are kept as bfloat16.

    ``calls`` is how many calls wait for one backward, as in a loss over several images: the first then leave room in
    the budget for the others.

    The module is wrapped, not changed: its parameters, hooks and modes are the user's own. ``state_dict`` of the
    wrapper is the module's, key for key.
    """

    #: Paths in plans and messages are the wrapped module's own.
    wraps_only = True

    def __init__(
        self,
        module: nn.Module,
        *,
        budget: int | str | None = None,
        tiles: int | Sequence[int] | None = None,
        backward_tiles: int | Sequence[int] | None = None,
        plan: Plan | None = None,
        host_budget: int | str | None = None,
        disk: bool | str = True,
        halo: str = "auto",
        half: bool = False,
        policy: str = "auto",
        calls: int = 1,
    ):
        super().__init__()
        if budget is not None and (tiles is not None or plan is not None):
            raise ValueError("give a budget, or tiles, or a plan: a budget decides about tiles itself")
        self.module = module
        self.settings = Settings(
            _grid(tiles),
            _grid(backward_tiles),
            budget=None if budget is None else parse_bytes(budget),
            host_budget=None if host_budget is None else parse_bytes(host_budget),
            disk=disk,
            given=plan,
            halo=halo,
            half=half,
            policy=policy,
            calls=calls,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        gather = not any(isinstance(a, LazyTensor) for a in _leaves((args, kwargs)))
        args, kwargs = tree_map(self._lazy, (args, kwargs))
        with recording_eagerly():
            out = self.module(*args, **kwargs)
        return tree_map(_settle, out) if gather else out

    def _lazy(self, a: Any) -> Any:
        if isinstance(a, LazyImage):
            a._session.root().settings = self.settings
            return a
        # A tensor of whole numbers with three dimensions is a target (N, H, W), not an image of H channels.
        image = isinstance(a, Tensor) and (a.dim() > 3 or (a.dim() == 3 and a.is_floating_point()))
        if image and not isinstance(a, LazyTensor):
            return LazyImage.from_tensor(a, settings=self.settings)
        return a

    @property
    def plan(self) -> Plan | None:
        """The plan of the last execution."""
        return self.settings.plan

    @property
    def peak_bytes(self) -> int:
        """What the last step (from its forward on, until the next) really held on the device at its worst moment."""
        return 0 if self.settings.ledger is None else self.settings.ledger.peak_bytes

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


def _grid(tiles: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if tiles is None:
        return None
    return (tiles,) if isinstance(tiles, int) else tuple(tiles)


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


def _settle(a: Any) -> Any:
    return materialize(a) if isinstance(a, LazyTensor) else a
