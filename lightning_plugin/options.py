"""The engine's options about memory and tiles, for modules, plans and strategies alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, get_args

from lightning_plugin.graph import Rewriting
from lightning_plugin.plan import Plan
from lightning_plugin.units import parse_bytes

__all__ = ["ModuleOptions", "RankOptions", "StrategyOptions"]

Size = int | str | None
Tiles = int | Sequence[int] | None
Halo = Literal["auto", "recompute", "share", "split", "stochastic_split"]
Chains = Literal["auto", "always", "never"]
Compile = Literal["never", "tiles", "graphs"]
Half = bool | Literal["device"]
HomeTier = Literal["auto", "device", "host", "disk"]
#: Values of ``halo`` that split the network: approximations.
SPLIT_HALOS = ("split", "stochastic_split")


class RankOptions(TypedDict, total=False):
    """Options of each process, where there may be several.

    Args:
        budget: Device memory that a step may use, such as ``"8GiB"``; the planner then chooses the tiles.
        tiles: Number of tiles along each spatial axis, in place of a budget.
        backward_tiles: Number of tiles in the backward pass, if it differs.
        host_budget: Host memory for maps and parameters that do not fit an accelerator: 0 is none; by default 64 GiB,
            and at most half of this machine's memory for its own devices.
        disk: True, the default, lets maps and parameters that fit neither device nor host go to temporary files; a path
            is the folder for them.
        halo: Rows that two neighbouring tiles both need: "recompute" has both tiles compute them, "share" has one hand
            them to the other, and "auto", the default, is the faster of the two. Two approximations for training:
            "split" has windows of the first operators see nothing beyond their own split of the image, and
            "stochastic_split" moves the splits in each step.
        splits: Number of splits along each spatial axis, with ``halo="split"`` or ``"stochastic_split"``.
        split_depth: Depth to which the network is split: a share of its window operators (0.5 by default), or the path
            of a module.
        wobble: Largest distance by which "stochastic_split" moves a cut, as a part of a split's side, below 0.5; 0.2 by
            default.
        half: Keep stored maps that leave the device as bfloat16; "device" keeps those that stay on the device so, too.
            False by default. An approximation: gradients lose digits.
        chains: "always" plans a long run of equal layers as a chain of links, which stores a few of their maps and
            recomputes the others by divide and conquer; "never" does not; "auto", the default, does in networks of
            thousands of operators.
        compile: Compilation of tiles that are the same computation and have come often: "never", the default; "tiles",
            by `torch.compile`; "graphs", which replays them as CUDA graphs besides. Compiling takes seconds for each
            kind of tile, and a budget counts the memory of tiles as if they were not compiled.
        trim: On a CPU, give freed memory back to the system when the process keeps much more than the budget counts.
            True by default; False leaves that to the C library.
    """

    budget: Size
    tiles: Tiles
    backward_tiles: Tiles
    host_budget: Size
    disk: bool | str
    halo: Halo
    splits: Tiles
    split_depth: float | str
    wobble: float
    half: Half
    chains: Chains
    compile: Compile
    trim: bool


class StrategyOptions(RankOptions, total=False):
    """Options of a strategy for one device.

    Args:
        parameters: The tier for parameters that do not fit the device, with their gradients and optimizer states:
            "host", "disk", or "auto", the default, which is the first of the two that has room; "device" keeps all of
            them on the device. On a CPU "auto" is the disk, and "host" is memory beside the budget.
    """

    parameters: HomeTier


class ModuleOptions(StrategyOptions, total=False):
    """Options of a module or of a plan. (A strategy has no ``calls``: it plans all calls of a step together.)

    Args:
        calls: Number of calls of the module before one backward; 1 by default. Each has a plan of its own, and the
            first ones leave room in the budget for the others.
    """

    calls: int


def inherit_argument_docs(*kinds: Any) -> None:
    """Add the documented arguments of each class to the docstrings of the ones after it, for command lines' help."""
    inherited = ""
    for kind in kinds:
        summary, _, own = (kind.__doc__ or "").partition("    Args:\n")
        inherited += own.rstrip(" ")
        kind.__doc__ = f"{summary}    Args:\n{inherited}    "


inherit_argument_docs(RankOptions, StrategyOptions, ModuleOptions)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The user's options, parsed. `ModuleOptions` documents each of them; ``plan`` is a plan to run in place of both
    ``budget`` and ``tiles``."""

    budget: int | None = None
    tiles: tuple[int, ...] | None = None
    backward_tiles: tuple[int, ...] | None = None
    host_budget: int | None = None
    disk: bool | str = True
    halo: Halo = "auto"
    splits: tuple[int, ...] | None = None
    split_depth: float | str = 0.5
    wobble: float = 0.2
    half: Half = False
    chains: Chains = "auto"
    compile: Compile = "never"
    trim: bool = True
    parameters: HomeTier = "auto"
    calls: int = 1
    plan: Plan | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and self.tiles is not None:
            raise ValueError("give a budget or tiles, not both: under a budget the planner chooses the tiles")
        if self.budget is not None and self.plan is not None:
            raise ValueError("give a budget or a plan, not both: under a budget the planner makes the plan")
        if (self.splits is None) == (self.halo in SPLIT_HALOS):
            raise ValueError(
                f'halo={self.halo!r} with splits={self.splits}: splits are given with halo="split" or '
                'halo="stochastic_split", such as splits=2, and with no other halo'
            )
        _ = self.splitting  # validates itself
        if self.calls < 1:
            raise ValueError(f"calls={self.calls}: give the number of calls before one backward, 1 or more")
        if self.half not in (False, True, "device"):
            raise ValueError(f"half={self.half!r}: give False, True or 'device'")
        if self.parameters not in get_args(HomeTier):
            raise ValueError(f"parameters={self.parameters!r}: give {', '.join(map(repr, get_args(HomeTier)))}")
        if self.chains not in get_args(Chains):
            raise ValueError(f"chains={self.chains!r}: give {', '.join(map(repr, get_args(Chains)))}")
        if self.compile not in get_args(Compile):
            raise ValueError(f"compile={self.compile!r}: give {', '.join(map(repr, get_args(Compile)))}")
        if isinstance(self.disk, str) and not os.access(self.disk, os.W_OK | os.X_OK):
            raise ValueError(
                f"disk={self.disk!r} is not a folder that can be written to. Give disk=True for the system's folder of "
                "temporary files, disk=False, or a folder that is there."
            )

    @staticmethod
    def parse(given: RankOptions, kind: type[Any] = ModuleOptions) -> Options:
        """Parse options as a user gave them; one that the class ``kind`` does not have is an error."""
        unknown = given.keys() - kind.__annotations__.keys()
        if unknown:
            raise TypeError(f"{min(unknown)!r} is no option; the options are {', '.join(kind.__annotations__)}")
        parsed: dict[str, Any] = {n: PARSERS[n](value) if n in PARSERS else value for n, value in given.items()}
        return Options(**parsed)

    def __str__(self) -> str:
        """The options that differ from the defaults."""
        defaults = Options()
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "plan"}
        texts = [f"{name}={value!r}" for name, value in values.items() if value != getattr(defaults, name)]
        return ", ".join(texts if self.plan is None else ["plan=...", *texts]) or "no options"

    @property
    def chaining(self) -> Chains:
        """The value of ``chains`` in effect: the user's under a budget, else the plan's."""
        if self.plan is not None:
            return "always" if self.plan.chains else "never"
        return self.chains if self.budget is not None else "never"

    @property
    def approximation(self) -> str:
        """The approximation in words, for checkpoints and logs; empty if there is none."""
        return "" if self.splitting is None else str(self.splitting)

    @property
    def splitting(self) -> Rewriting | None:
        """The split of the network; None if it is not split."""
        if self.splits is None:
            return None
        from lightning_plugin.split import Splitting  # imported only by those who ask for this approximation

        return Splitting(self.splits, self.split_depth, self.wobble if self.halo == "stochastic_split" else None)

    @property
    def folder(self) -> str | None:
        """The folder of temporary files; None is the system's."""
        return self.disk if isinstance(self.disk, str) else None


def parse_size(size: Size) -> int | None:
    return None if size is None else parse_bytes(size)


def parse_counts(counts: Tiles) -> tuple[int, ...] | None:
    if counts is None:
        return None
    return (counts,) if isinstance(counts, int) else tuple(counts)


#: Parsers of options with several notations: sizes as texts, one number of tiles for all axes.
PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "budget": parse_size,
    "host_budget": lambda size: 0 if size == 0 else parse_size(size),
    "tiles": parse_counts,
    "backward_tiles": parse_counts,
    "splits": parse_counts,
}
