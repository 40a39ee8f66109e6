"""The engine's options: what a user may say about memory and tiles, wherever it is said."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, get_args

from lightning_plugin.graph import Rewriting
from lightning_plugin.plan import Plan
from lightning_plugin.units import parse_bytes

Size = int | str | None
Tiles = int | Sequence[int] | None
Halo = Literal["auto", "recompute", "share", "split", "stochastic_split"]
Chains = Literal["auto", "always", "never"]
Compile = Literal["never", "tiles", "graphs"]
HomeTier = Literal["auto", "device", "host", "disk"]
#: Those that split the network: approximations.
SPLITS = ("split", "stochastic_split")


class RankWords(TypedDict, total=False):
    """Options as a user gives them, wherever there may be several processes.

    Args:
        budget: Device memory that a step may use, such as ``"8GiB"``; it leaves the tiles to the planner.
        tiles: Into how many tiles to cut each spatial axis, instead of a budget.
        backward_tiles: The same for the backward pass, where it should differ.
        host_budget: Host memory for what does not fit the device, where the device is not the CPU: none if 0, 64 GiB if
            not given, and on this machine's own devices no more than half of its memory.
        disk: Whether what fits neither may go to temporary files, or the folder for them.
        halo: What neighbouring tiles do about the rows between them: both compute them ("recompute"), one hands them
            on ("share"), or "auto", which is faster. Two are approximations: "split" has the windows of the first
            operators see nothing beyond their own split of the image while a module trains, and "stochastic_split" cuts
            it at other places in each step.
        splits: Into how many splits to cut each spatial axis, where ``halo`` says that it is split.
        split_depth: Up to where: a share of the network's window operators, or the path of a module.
        wobble: How far "stochastic_split" moves each cut at most, as a part of a split's side, below 0.5.
        half: Keep maps that leave the device as bfloat16. An approximation: gradients lose digits.
        chains: Whether long runs of equal layers are planned as one: as a chain of links, of which few maps are stored
            at a time and the others made again by divide and conquer. "auto" does so in networks of thousands of
            operators.
        compile: Whether tiles that are the same computation are compiled when they have come often: "never"; "tiles",
            by `torch.compile`; or "graphs", which replays them as CUDA graphs besides. Compiling takes seconds for each
            kind of tile, and a budget counts what tiles hold as if they were not compiled.
        trim: Whether the process gives freed memory back to the system where it keeps much more than a budget counts,
            on a CPU. False leaves that to the C library.
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
    half: bool
    chains: Chains
    compile: Compile
    trim: bool


class StrategyWords(RankWords, total=False):
    """Options as a user gives them to a strategy for one device.

    Args:
        parameters: Where parameters live that do not fit the device, with their gradients and optimizer's state: on
            the "host", on the "disk", or "auto", the first of the two that has room; "device" lets none leave. On a CPU
            the host's memory is the device's: there "auto" is the disk, and "host" memory beside the budget.
    """

    parameters: HomeTier


class Words(StrategyWords, total=False):
    """Options as a user gives them to a module or to a plan. A strategy plans all calls of a step together.

    Args:
        calls: How many calls wait for one backward, each under a plan of its own: the first then leave room in the
            budget for the others.
    """

    calls: int


def documented(*words: Any) -> None:
    """Have words say what those mean that they have of the ones before them: command lines look no further."""
    said = ""
    for each in words:
        first, _, own = (each.__doc__ or "").partition("    Args:\n")
        said += own.rstrip(" ")
        each.__doc__ = f"{first}    Args:\n{said}    "


documented(RankWords, StrategyWords, Words)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The user's options: `Words` has the meaning of each option. ``plan`` is a plan to run by."""

    budget: int | None = None
    tiles: tuple[int, ...] | None = None
    backward_tiles: tuple[int, ...] | None = None
    host_budget: int | None = None
    disk: bool | str = True
    halo: Halo = "auto"
    splits: tuple[int, ...] | None = None
    split_depth: float | str = 0.5
    wobble: float = 0.2
    half: bool = False
    chains: Chains = "auto"
    compile: Compile = "never"
    trim: bool = True
    parameters: HomeTier = "auto"
    calls: int = 1
    plan: Plan | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and self.tiles is not None:
            raise ValueError("give a budget or tiles, not both: a budget decides about tiles itself")
        if self.budget is not None and self.plan is not None:
            raise ValueError("give a budget, or tiles, or a plan: a budget decides about tiles itself")
        if (self.splits is None) == (self.halo in SPLITS):
            raise ValueError(
                f'halo={self.halo!r} with splits={self.splits}: splits are given with halo="split" or '
                'halo="stochastic_split", such as splits=2, and with no other halo'
            )
        _ = self.splitting  # which says what is wrong with it
        if self.calls < 1:
            raise ValueError(f"calls={self.calls}: a step has one call or more")
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
    def parse(words: RankWords, kind: type[Any] = Words) -> Options:
        """Options from words of a kind that a user gave."""
        unknown = words.keys() - kind.__annotations__.keys()
        if unknown:
            raise TypeError(f"{min(unknown)!r} is no option; those are {', '.join(kind.__annotations__)}")
        found: dict[str, Any] = {name: READ[name](given) if name in READ else given for name, given in words.items()}
        return Options(**found)

    def __str__(self) -> str:
        """The options that are not the usual ones."""
        usual = Options()
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "plan"}
        words = [f"{name}={value!r}" for name, value in given.items() if value != getattr(usual, name)]
        return ", ".join(words if self.plan is None else ["plan=...", *words]) or "no options"

    @property
    def chaining(self) -> Chains:
        """The word for when long runs of equal links become chains: for a budget, or for a plan that has some."""
        if self.plan is not None:
            return "always" if self.plan.chains else "never"
        return self.chains if self.budget is not None else "never"

    @property
    def approximation(self) -> str:
        """The approximation in words, for a checkpoint and for people; nothing where there is none."""
        return "" if self.splitting is None else str(self.splitting)

    @property
    def splitting(self) -> Rewriting | None:
        """The split of the network, if it is split."""
        if self.splits is None:
            return None
        from lightning_plugin.split import Splitting  # an approximation, which is there for who asks for it

        return Splitting(self.splits, self.split_depth, self.wobble if self.halo == "stochastic_split" else None)

    @property
    def folder(self) -> str | None:
        """The folder of maps on the disk; None is the system's folder of temporary files."""
        return self.disk if isinstance(self.disk, str) else None


def size(given: Size) -> int | None:
    return None if given is None else parse_bytes(given)


def grid(tiles: Tiles) -> tuple[int, ...] | None:
    if tiles is None:
        return None
    return (tiles,) if isinstance(tiles, int) else tuple(tiles)


#: Readers of options that may be given in other words: sizes as texts, one number of tiles for every axis.
READ: Mapping[str, Callable[[Any], Any]] = {
    "budget": size,
    "host_budget": lambda given: 0 if given == 0 else size(given),
    "tiles": grid,
    "backward_tiles": grid,
    "splits": grid,
}
