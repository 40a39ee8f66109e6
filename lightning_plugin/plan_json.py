"""Plans as JSON: written in one version, read in all that there were. A text may be edited by hand, and is checked.

- Version 1 says no version; what is decided and what is predicted lie side by side.
- In version 2 predictions have an object of their own, ``forecast``, in each segment and in the plan.
- In version 3 a segment may say in how many ``pieces`` its tiles read keys.
- In version 4 a plan may say which parameters live ``on_host`` and ``on_disk``, and whether they are ``fetched_ahead``;
  and what is approximate in it (``approximation``).
- In version 5 a plan may say how its ``chains`` run: once for all links of one.
- In version 6 a segment may say that identical tiles are evaluated once in backward (``alike``).
- In version 7 a segment may say that backward reads back what it has stored (``recall``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, fields
from typing import Any, TypeVar

from lightning_plugin.boxes import Grid
from lightning_plugin.errors import PlanError
from lightning_plugin.plan_fields import BarePlan, ChainPlan, SegmentPlan
from lightning_plugin.plan_forecast import ChainForecast, Forecast, SegmentForecast

#: The version that is written.
VERSION = 7

P = TypeVar("P", bound=BarePlan)


def written(plan: BarePlan) -> str:
    return json.dumps({"version": VERSION, **asdict(plan)}, indent=1)


def read(text: str, kind: type[P]) -> P:
    """The plan that a text says, in the class that is asked for."""
    try:
        data = json.loads(text, object_pairs_hook=said_once)
        if not isinstance(data, dict):
            raise ValueError(f"it is {shown(data)}, and should be an object with the key 'segments'")
        form = FORMS[version_of(data)](data)
    except RecursionError as error:
        raise PlanError("this is not a plan: its values are nested too deep") from error
    except ValueError as error:  # json.JSONDecodeError is one
        raise PlanError(f"this is not a plan: {error}") from error
    try:
        return built(kind, form, "the plan")
    except (ValueError, PlanError) as error:  # what grids and segments say of themselves
        raise PlanError(f"this is not a plan: {error}") from error


def said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; one that says a key twice is refused, of which readers of JSON take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it says {shown(next(n for n in names if names.count(n) > 1))} twice in one object")
    return found


def version_of(data: dict[str, Any]) -> int:
    """The version that a plan says it has, which is taken out."""
    version = data.pop("version", 1)
    if type(version) is int and version > VERSION:
        raise PlanError(
            f"this plan is of version {version}, and this lightning_plugin reads versions up to {VERSION}: update "
            "lightning_plugin, or make the plan again with the one that is installed"
        )
    if type(version) is not int or version not in FORMS:
        raise ValueError(f"its version is {shown(version)}, and there are {' and '.join(map(str, FORMS))}")
    return version


def apart(data: dict[str, Any]) -> dict[str, Any]:
    """A plan of version 1 in the form of version 2."""
    found = with_forecast(data, Forecast, "the plan")
    segments = found.get("segments")
    if isinstance(segments, list):
        found["segments"] = [with_forecast(s, SegmentForecast, f"segment {i}") for i, s in enumerate(segments)]
    return found


def with_forecast(data: Any, kind: type, whose: str) -> Any:
    """An object whose predictions are put into one of their own; anything else is refused later."""
    if not isinstance(data, dict):
        return data
    if "forecast" in data:
        raise ValueError(f"{whose} has a 'forecast', which is of version 2, and the text does not say \"version\": 2")
    figures = {f.name for f in fields(kind)}
    decided = {name: value for name, value in data.items() if name not in figures}
    return {**decided, "forecast": {name: value for name, value in data.items() if name in figures}}


#: How a plan of each version gets the form of the latest.
FORMS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: apart,
    **dict.fromkeys(range(2, VERSION + 1), dict),
}


def built(kind: type[Any], data: Any, what: str) -> Any:
    """An object of JSON as a dataclass; a key that is none of its fields, and one that is missing, is named."""
    known = {f.name: f for f in fields(kind)}
    if not isinstance(data, dict):
        raise ValueError(f"{what} is {shown(data)}, and should be an object with some of the keys {', '.join(known)}")
    for name in data:
        if name not in known:
            raise ValueError(f"{what} has an unknown key {name!r}; its keys are {', '.join(known)}")
    for name, field in known.items():
        if name not in data and required(field):
            raise ValueError(f"{what} has no {name!r}")
    return kind(**{name: value_of(known[name], value, what) for name, value in data.items()})


def value_of(field: Field[Any], value: Any, what: str) -> Any:
    """What a key's value stands for."""
    declared = str(field.type)  # annotations are texts here
    if declared in OBJECTS:
        return built(OBJECTS[declared], value, f"{field.name!r} of {what}")
    if declared in LISTS and isinstance(value, list):
        one, kind = LISTS[declared]
        return tuple(built(kind, each, f"{one} {i}") for i, each in enumerate(value))
    words, fits = VALUES[declared]
    if not fits(value):
        raise ValueError(f"{field.name!r} of {what} is {words}, not {shown(value)}")
    return tuple(value) if isinstance(value, list) else value


def required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def shown(value: Any) -> str:
    """A value as JSON writes it, short enough for a message."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def whole(value: Any) -> bool:
    return type(value) is int


def number(value: Any) -> bool:
    return type(value) in (int, float)


def listed(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


#: Fields that are objects of their own, by their type.
OBJECTS: dict[str, type] = {
    "Grid": Grid,
    "SegmentForecast": SegmentForecast,
    "ChainForecast": ChainForecast,
    "Forecast": Forecast,
}
#: Fields that are lists of such objects, and what one of them is called.
LISTS: dict[str, tuple[str, type]] = {
    "tuple[SegmentPlan, ...]": ("segment", SegmentPlan),
    "tuple[ChainPlan, ...]": ("chain", ChainPlan),
}
#: What the value of another field is, in words and as a test, by its type.
VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number", whole),
    "int | None": ("a whole number or null", lambda value: value is None or whole(value)),
    "float": ("a number", number),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("a text", lambda value: isinstance(value, str)),
    "tuple[int, ...]": ("a list of whole numbers", listed(whole)),
    "tuple[str, ...]": ("a list of texts", listed(lambda value: isinstance(value, str))),
    "tuple[SegmentPlan, ...]": ("a list of segments", lambda value: False),
    "tuple[ChainPlan, ...]": ("a list of chains", lambda value: False),
}
