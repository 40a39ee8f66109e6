"""A plan: which maps are stored and where, in which segments the network runs, on which tile grids, at what cost.

A plan names values by the place of their node among the nodes of a run, so that it fits every run of the same network
at the same shapes. It is data: the executor holds no policy, and whatever a plan says, the result is the same. A
forecast (bytes and seconds) decides nothing, and plans are compared without it. `plan_views` draws plans.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from lightning_plugin import plan_views
from lightning_plugin.boxes import Grid
from lightning_plugin.errors import PlanError

#: The version of the JSON format.
VERSION = 1


@dataclass(frozen=True)
class SegmentForecast:
    """Predicted figures of one segment.

    Attributes:
        stored_bytes: Its stored maps.
        forward_bytes: The peak on the device during its forward.
        backward_bytes: The peak on the device during its backward.
        backward_needs: What its backward needs beyond the bytes held when it begins.
        retained_needs: The same under ``retain_graph=True``, where nothing that is held is freed on the way.
        seconds: Its time in a step.
        recompute: Recomputed work, as a share of its forward work.
        copied_bytes: Copies of parameters that live below, which each pass fetches.
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
        slot_bytes: A slot.
        link_bytes: What a link needs at the most while it is pulled back.
        kept_bytes: A link that is kept.
        forwards: Runs of links forward before they are pulled back, all together.
        seconds: Its time in a step.
        peak_bytes: The peak on the device during its turns.
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
        peak_bytes: The peak on the device.
        plain_bytes: Bytes that plain PyTorch holds for backward: activations and input.
        index_bytes: Pooling indices and masks among them.
        seconds: The time of a step.
        recompute: Recomputed work, as a share of the forward work.
        fixed_bytes: Parameters on the device, with their gradients and the optimizer's state.
        reserve_bytes: Bytes of the peak that are left to the device's libraries (see `planner.costs.rates`).
        held_bytes: Bytes that the call leaves on the device until its backward.
        streamed_bytes: Parameters that live below the device.
        traffic_bytes: Transfers of these parameters and their gradients in a step.
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


#: Tiers of stored maps. The order in which they are filled is `costs.lower.tier_of`'s.
TIERS = ("device", "host", "disk")
#: No boundary is dropped so deep.
DEEPEST = sys.maxsize
#: Rows between neighbouring tiles: both compute them, or one hands them on.
HALOS = ("recompute", "share")


@dataclass(frozen=True)
class SegmentPlan:
    """The decisions for one segment.

    Attributes:
        targets: Places of the nodes whose results it makes: reduce nodes and stored maps; if it is kept, all its nodes.
        forward: The grid of forward.
        backward: The grid of backward.
        keep: All its nodes run whole with ordinary autograd, as in plain PyTorch; its grids are of one tile.
        tier: The tier of its stored maps.
        halo: Rows between neighbouring tiles: "recompute", or "share", with which tiles run in order and hand rows on,
            and the grid cuts one axis.
        half: Maps on a lower tier are stored as bfloat16, which loses digits.
        ahead: Transfers to and from lower tiers overlap with the work on other tiles.
        drop: The depth to which its stored maps are dropped, freed after forward and recomputed in backward (see [Note:
            dropped] in `execute.function`); 0 is not at all.
        pieces: The number of pieces in which a tile of queries reads the keys and values that it attends to (see [Note:
            pieces] in `rules.pieces`).
        alike: Identical tiles are looked for and evaluated once (see [Note: identical tiles] in `execute.tile_pass`).
        recall: Backward reads back stored maps that only reductions read (see [Note: recall] in `program.program`).
        path: Names its modules for people; it decides nothing.
        forecast: Predicted figures; they decide nothing.
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
    def may_recall(self) -> bool:
        """True if what it stores is there in backward, to the bit and tile by tile."""
        return not (self.keep or self.halo == "share" or self.half or self.drop)

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise PlanError(f"a map is stored on one of {', '.join(TIERS)}, not on {self.tier!r}")
        if self.keep and self.ahead:
            raise PlanError("a segment that is kept has no tiles to transfer ahead")
        if self.drop < 0:
            raise PlanError(f"maps are dropped to a depth of 0 (not at all) or more, not {self.drop}")
        if self.drop and (self.keep or self.tier != "device" or self.halo == "share"):
            raise PlanError(
                "only a tiled segment that stores on the device and recomputes its halos can drop what it stores"
            )
        if self.pieces < 1 or (self.pieces > 1 and (self.keep or self.halo == "share")):
            raise PlanError(
                "keys are read in one piece or more, in several only by a tiled segment that recomputes its halos; "
                f"not in {self.pieces}"
            )
        if self.alike and (self.keep or self.halo == "share"):
            raise PlanError("alike=True needs keep=False and halo='recompute'")
        if self.recall and not self.may_recall:
            raise PlanError(
                "only a tiled segment that recomputes its halos, and stores its maps as they are, can read them back"
            )
        if self.halo not in HALOS:
            raise PlanError(f"halos are {' or '.join(HALOS)}, not {self.halo!r}")
        if self.halo == "share" and self.forward != self.backward:
            raise PlanError(
                f"a segment that shares halos has one grid for both directions, not {self.forward} and {self.backward}"
            )


@dataclass(frozen=True)
class ChainPlan:
    """The decisions for one chain (see [Note: chain] in `chain`).

    Attributes:
        node: The place of its node.
        count: The number of links.
        slots: The number of maps between links that are stored at a time, beside the first.
        kept: The number of last links that are kept as plain PyTorch keeps them.
        segments: The plan of a link, whose targets are places among its own nodes.
        path: Names its modules for people; it decides nothing.
        forecast: Predicted figures; they decide nothing.
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
    """All that is decided before a step, and its predicted cost.

    Plans are equal if and only if they decide the same.

    Attributes:
        segments: The segments, in order.
        budget: The budget that it keeps.
        shape: The shape of the image.
        barriers: The operators that run whole.
        approximation: The approximation in what it runs.
        forecast: Predicted figures; they decide nothing.
        on_host: Captured tensors (parameters) on the host, by the places of their nodes.
        on_disk: Captured tensors on the disk.
        fetched_ahead: Copies of them are fetched before the use that they are for (see [Note: streamed] in
            `residency.homes`).
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
        """The share of the forward work that is predicted to be done again."""
        return self.forecast.recompute

    def to_json(self) -> str:
        """The plan as text, which `from_json` reads."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan in a JSON text; a text edited by hand is checked."""
        return read(text)

    def __str__(self) -> str:
        return plan_views.table(self)

    def draw(self, path: str) -> None:
        """Write a picture: memory over the step by segment against the budget line."""
        plan_views.draw(self, path)


def read(text: str) -> Plan:
    """The plan in a JSON text; an error names the key at fault."""
    try:
        data = json.loads(text, object_pairs_hook=said_once)
        if not isinstance(data, dict):
            raise ValueError(f"it is {shown(data)}, and should be an object with the key 'segments'")
        if type(version := data.pop("version", None)) is not int or version != VERSION:
            raise ValueError(
                f"its version is {shown(version)}, and this lightning_plugin reads version {VERSION}: make the plan "
                "again with the one that is installed"
            )
        return built(Plan, data, "the plan")
    except RecursionError as error:
        raise PlanError("this is not a plan: its values are nested too deep") from error
    except (ValueError, PlanError) as error:  # of JSON; and of grids and segments about themselves
        raise PlanError(f"this is not a plan: {error}") from error


def said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a key that stands there twice is refused, of which readers of JSON take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it says {shown(next(n for n in names if names.count(n) > 1))} twice in one object")
    return found


def built(kind: type[Any], data: Any, what: str) -> Any:
    """An object of JSON as a dataclass; a key that is none of its fields, and one that is missing, is named."""
    known = {f.name: f for f in fields(kind)}
    if not isinstance(data, dict):
        raise ValueError(f"{what} is {shown(data)}, and should be an object with some of the keys {', '.join(known)}")
    for name in data:
        if name not in known:
            raise ValueError(f"{what} has an unknown key {name!r}; its keys are {', '.join(known)}")
    for name, f in known.items():
        if name not in data and f.default is MISSING:
            raise ValueError(f"{what} has no {name!r}")
    types = get_type_hints(kind)
    return kind(**{name: value_of(types[name], value, f"{name!r} of {what}") for name, value in data.items()})


def value_of(declared: Any, value: Any, what: str) -> Any:
    """The value of a declared type that a value of JSON stands for."""
    if is_dataclass(declared):
        return built(declared, value, what)  # type: ignore[arg-type]
    if get_origin(declared) is tuple:
        one = get_args(declared)[0]
        if not isinstance(value, list) or not (is_dataclass(one) or all(fits(one, each) for each in value)):
            raise ValueError(f"{what} is a list of {WORDS[one][1]}, not {shown(value)}")
        return tuple(value_of(one, each, f"{WORDS[one][0]} {i}") for i, each in enumerate(value))
    if not fits(declared, value):
        raise ValueError(f"{what} is {WORDS[declared][0]}, not {shown(value)}")
    return value


def fits(declared: Any, value: Any) -> bool:
    """True if a value of JSON is one of a plain type: truths are no numbers, whole numbers are numbers too."""
    return type(value) in (int, float) if declared is float else type(value) in (get_args(declared) or (declared,))


def shown(value: Any) -> str:
    """A value as JSON writes it, short enough for a message."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


#: The types of values in words: one, and several.
WORDS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    int | None: ("a whole number or null", ""),
    float: ("a number", "numbers"),
    bool: ("true or false", ""),
    str: ("a text", "texts"),
    SegmentPlan: ("segment", "segments"),
    ChainPlan: ("chain", "chains"),
}
