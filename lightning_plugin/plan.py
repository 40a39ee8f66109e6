"""`Plan`: the segments in which a network runs, their tile grids, the tiers of stored maps, and the predicted cost.

A plan names values by the index of their node among the nodes of a run, so that it fits every run of the same network
at the same shapes. It is data: the executor makes no decisions, and the result is the same under any plan. Forecasts
(bytes and seconds) have no effect on a run, and plans are compared without them. `plan_views` draws plans.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from lightning_plugin import plan_views
from lightning_plugin.boxes import Grid
from lightning_plugin.errors import PlanError

__all__ = ["ChainForecast", "ChainPlan", "Forecast", "Plan", "SegmentForecast", "SegmentPlan"]

#: The version of the JSON format.
VERSION = 1


@dataclass(frozen=True)
class SegmentForecast:
    """Predicted figures of one segment.

    Attributes:
        stored_bytes: Bytes of its stored maps.
        forward_bytes: Peak on the device during its forward.
        backward_bytes: Peak on the device during its backward.
        backward_needs: Bytes that its backward allocates at its peak.
        retained_needs: The same under ``retain_graph=True``, where backward frees nothing.
        seconds: Time in a step.
        recompute: Recomputed work, as a share of its forward work; 0 where tiles compute less than plain PyTorch, as of
            tokens of which one is read.
        copied_bytes: Copies of streamed parameters, which each pass fetches.
    """

    stored_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    backward_needs: int = 0
    retained_needs: int = 0
    seconds: float = 0.0
    recompute: float = 0.0
    copied_bytes: int = 0


@dataclass(frozen=True)
class ChainForecast:
    """Predicted figures of a chain.

    Attributes:
        slot_bytes: Bytes of a slot.
        link_bytes: Peak of a link's backward.
        kept_bytes: Bytes of a kept link.
        forwards: Number of forward runs of links, repeated ones included.
        seconds: Time in a step.
        peak_bytes: Peak on the device during its forward and backward.
    """

    slot_bytes: int = 0
    link_bytes: int = 0
    kept_bytes: int = 0
    forwards: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Forecast:
    """Predicted figures of a whole step.

    Attributes:
        peak_bytes: Peak on the device.
        plain_bytes: Bytes that plain PyTorch holds for backward: activations and input.
        index_bytes: Pooling indices and masks among them.
        seconds: Time of a step.
        recompute: Recomputed work, as a share of the forward work.
        fixed_bytes: Parameters on the device, with their gradients and optimizer states.
        reserve_bytes: Bytes of the peak that are left to the device's libraries (see `planner.costs.rates`).
        held_bytes: Bytes that the call leaves on the device until its backward.
        streamed_bytes: Parameters on lower tiers.
        traffic_bytes: Transfers of these parameters and their gradients in a step.
        made_bytes: Bytes of all maps, as code holds them that keeps each of its intermediate results.
    """

    peak_bytes: int = 0
    plain_bytes: int = 0
    index_bytes: int = 0
    seconds: float = 0.0
    recompute: float = 0.0
    fixed_bytes: int = 0
    reserve_bytes: int = 0
    held_bytes: int = 0
    streamed_bytes: int = 0
    traffic_bytes: int = 0
    made_bytes: int = 0


#: Tiers of stored maps. `costs.lower.tier_of` decides the order in which they are filled.
TIERS = ("device", "host", "disk")
#: A depth larger than that of any dropped boundary.
DEEPEST = sys.maxsize
#: Rows that two neighbouring tiles need: both compute them, or one hands them to the other.
HALOS = ("recompute", "share")


@dataclass(frozen=True)
class SegmentPlan:
    """Decisions for one segment.

    Attributes:
        targets: Indices of the nodes whose results the segment makes: reduce nodes and stored maps; of a kept segment
            all its nodes.
        forward: Tile grid of forward.
        backward: Tile grid of backward.
        keep: Its nodes run whole with ordinary autograd, as in plain PyTorch; its grids are of one tile.
        tier: Tier of its stored maps.
        halo: Rows that two neighbouring tiles need. "recompute": both compute them. "share": tiles run in order, one
            hands them to the next, and the grid cuts one axis.
        half: Stored maps are bfloat16, which loses digits.
        ahead: Transfers to and from lower tiers overlap with the work on other tiles.
        drop: Depth to which its stored maps are dropped, freed after forward and recomputed in backward (see [Note:
            dropped] in `execute.function`); 0 is not at all.
        pieces: Number of pieces in which a tile of queries reads the keys and values that it attends to (see [Note:
            pieces] in `rules.attention_pieces`).
        alike: Identical tiles are searched for and computed once (see [Note: identical tiles] in `execute.tile_pass`).
        recall: Backward reads stored maps back, if only reductions read them, in place of recomputing them (see [Note:
            recall] in `program.program`).
        path: Modules of the segment, for display only.
        forecast: Predicted figures, for display only.
    """

    targets: tuple[int, ...]
    forward: Grid
    backward: Grid
    keep: bool = False
    tier: str = "device"
    halo: str = "recompute"
    half: bool = False
    ahead: bool = False
    drop: int = 0
    pieces: int = 1
    alike: bool = False
    recall: bool = False
    path: str = field(default="", compare=False)
    forecast: SegmentForecast = field(default=SegmentForecast(), compare=False)

    @property
    def can_recall(self) -> bool:
        """True if backward can read its stored maps back, tile by tile and to the bit."""
        return not (self.keep or self.halo == "share" or self.half or self.drop)

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise PlanError(f"a map is stored on one of {', '.join(TIERS)}, not on {self.tier!r}")
        if self.keep and self.ahead:
            raise PlanError("a kept segment has no tiles to transfer ahead: give keep=False or ahead=False")
        if self.drop < 0:
            raise PlanError(f"maps are dropped to a depth of 0 (not at all) or more, not {self.drop}")
        if self.drop and (self.keep or self.tier != "device" or self.halo == "share"):
            raise PlanError("drop needs keep=False, tier='device' and halo='recompute'")
        if self.pieces < 1 or (self.pieces > 1 and (self.keep or self.halo == "share")):
            raise PlanError(
                f"pieces is 1 or more, and more than 1 needs keep=False and halo='recompute'; not {self.pieces}"
            )
        if self.alike and (self.keep or self.halo == "share"):
            raise PlanError("alike=True needs keep=False and halo='recompute'")
        if self.recall and not self.can_recall:
            raise PlanError("recall=True needs keep=False, halo='recompute', half=False and drop=0")
        if self.halo not in HALOS:
            raise PlanError(f"halos are {' or '.join(HALOS)}, not {self.halo!r}")
        if self.halo == "share" and self.forward != self.backward:
            raise PlanError(
                f"halo='share' needs the same grid in forward and backward, not {self.forward} and {self.backward}"
            )


@dataclass(frozen=True)
class ChainPlan:
    """Decisions for one chain (see [Note: chain] in `chain`).

    Attributes:
        node: Index of its node.
        count: Number of links.
        slots: Number of maps between links that are stored at a time, beside the first.
        kept: Number of last links that are kept as plain PyTorch keeps them.
        segments: Plan of a link; targets are indices of the link's own nodes.
        path: Modules of the chain, for display only.
        forecast: Predicted figures, for display only.
    """

    node: int
    count: int
    slots: int
    kept: int
    segments: tuple[SegmentPlan, ...]
    path: str = field(default="", compare=False)
    forecast: ChainForecast = field(default=ChainForecast(), compare=False)

    def __post_init__(self) -> None:
        if self.slots < 0 or not 0 <= self.kept <= self.count:
            raise PlanError(
                f"a chain of {self.count} links has 0 slots or more and keeps 0 to {self.count} links; this one has "
                f"{self.slots} and keeps {self.kept}"
            )


@dataclass(frozen=True)
class Plan:
    """All decisions before a step, and its predicted cost. Plans are equal if their decisions are.

    Attributes:
        segments: The segments, in order.
        budget: The budget that the plan keeps.
        shape: Shape of the image.
        barriers: Operators that run whole.
        approximation: The approximation in the recorded network, in words.
        forecast: Predicted figures, for display only.
        on_host: Captured tensors (parameters) on the host, by the indices of their nodes.
        on_disk: Captured tensors on the disk.
        fetched_ahead: Copies of them are fetched before they are used (see [Note: streamed] in `residency.homes`).
        chains: The chains.
    """

    segments: tuple[SegmentPlan, ...]
    budget: int | None = None
    shape: tuple[int, ...] = ()
    barriers: tuple[str, ...] = ()
    approximation: str = ""
    forecast: Forecast = field(default=Forecast(), compare=False)
    on_host: tuple[int, ...] = ()
    on_disk: tuple[int, ...] = ()
    fetched_ahead: bool = False
    chains: tuple[ChainPlan, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of a step on the device."""
        return self.forecast.peak_bytes

    @property
    def plain_bytes(self) -> int:
        """The bytes that plain PyTorch would hold for backward."""
        return self.forecast.plain_bytes

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.forecast.seconds

    @property
    def recompute(self) -> float:
        """The predicted recomputed work, as a share of the forward work."""
        return self.forecast.recompute

    @property
    def trains(self) -> bool:
        """True if a step has a backward pass."""
        segments = (*self.segments, *(s for c in self.chains for s in c.segments))
        return any(s.forecast.backward_bytes for s in segments)

    def stored_on(self, tier: str) -> int:
        """The bytes of the maps that are stored on a tier."""
        return sum(s.forecast.stored_bytes for s in self.segments if s.tier == tier and not s.keep)

    def to_json(self) -> str:
        """Write the plan as JSON, for `from_json`."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan from JSON; an error names the key at fault, since texts are edited by hand."""
        return parse_plan(text)

    def __str__(self) -> str:
        return plan_views.table(self)

    def draw(self, path: str) -> None:
        """Draw memory over the step, by segment, and the budget, into an image file."""
        plan_views.draw(self, path)


def parse_plan(text: str) -> Plan:
    """Read a plan from JSON; an error names the key at fault."""
    try:
        data = json.loads(text, object_pairs_hook=refuse_repeated_keys)
        if not isinstance(data, dict):
            raise ValueError(f"it is {shorten(data)}, and should be an object with the key 'segments'")
        if type(version := data.pop("version", None)) is not int or version != VERSION:
            raise ValueError(
                f"its version is {shorten(version)}, and this lightning_plugin reads version {VERSION}: make the plan "
                "again with the one that is installed"
            )
        return parse_dataclass(Plan, data, "the plan")
    except RecursionError as error:
        raise PlanError("this is not a plan: its values are nested too deep") from error
    except (ValueError, PlanError) as error:  # from JSON's decoder; from the checks of grids and segments
        raise PlanError(f"this is not a plan: {error}") from error


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary of a JSON object. Python's decoder would take the last of two equal keys."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it says {shorten(next(n for n in names if names.count(n) > 1))} twice in one object")
    return result


def parse_dataclass(kind: type[Any], data: Any, label: str) -> Any:
    """Make a dataclass of a JSON object; refuse unknown and missing keys. Messages name the object by ``label``."""
    known = {f.name: f for f in fields(kind)}
    if not isinstance(data, dict):
        raise ValueError(
            f"{label} is {shorten(data)}, and should be an object with some of the keys {', '.join(known)}"
        )
    for name in data:
        if name not in known:
            raise ValueError(f"{label} has an unknown key {name!r}; its keys are {', '.join(known)}")
    for name, f in known.items():
        if name not in data and f.default is MISSING:
            raise ValueError(f"{label} has no {name!r}")
    types = get_type_hints(kind)
    return kind(**{name: parse_value(types[name], value, f"{name!r} of {label}") for name, value in data.items()})


def parse_value(declared: Any, value: Any, label: str) -> Any:
    """Convert a JSON value to a declared type."""
    if is_dataclass(declared):
        return parse_dataclass(declared, value, label)  # type: ignore[arg-type]
    if get_origin(declared) is tuple:
        item = get_args(declared)[0]
        if not isinstance(value, list) or not (is_dataclass(item) or all(has_type(v, item) for v in value)):
            raise ValueError(f"{label} is a list of {TYPE_NAMES[item][1]}, not {shorten(value)}")
        return tuple(parse_value(item, v, f"{TYPE_NAMES[item][0]} {i}") for i, v in enumerate(value))
    if not has_type(value, declared):
        raise ValueError(f"{label} is {TYPE_NAMES[declared][0]}, not {shorten(value)}")
    return value


def has_type(value: Any, declared: Any) -> bool:
    """True if a JSON value has a plain type. A bool is no number; an int is a float too."""
    return type(value) in (int, float) if declared is float else type(value) in (get_args(declared) or (declared,))


def shorten(value: Any) -> str:
    """Write a value as JSON, at most 40 characters long."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


#: Names of types in messages: one value, and several.
TYPE_NAMES: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    int | None: ("a whole number or null", ""),
    float: ("a number", "numbers"),
    bool: ("true or false", ""),
    str: ("a text", "texts"),
    SegmentPlan: ("segment", "segments"),
    ChainPlan: ("chain", "chains"),
}
