"""What would have been valid: keys near a wrong one, and the values that a type allows."""

import argparse
import importlib
import inspect
import types
from difflib import get_close_matches
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

OWN_KEYS = ("help", "config", "print_config", "print_shtab", argparse.SUPPRESS)
MAX_LISTED = 24


def keys_of(parser: argparse.ArgumentParser, positional: bool = True) -> list[str]:
    """The keys that a config file may hold, without the parser's own and without the names of groups."""
    keys = [
        action.dest
        for action in parser._actions
        if action.dest not in OWN_KEYS and not action.dest.endswith(".help") and (positional or action.option_strings)
    ]
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


def keys_of_class(class_path: str) -> list[str]:
    """The arguments of a class that a config names by its import path; none if it cannot be imported."""
    module_name, _, name = class_path.rpartition(".")
    try:
        parameters = inspect.signature(getattr(importlib.import_module(module_name), name)).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return []
    return list(parameters)


def suggest(wrong: str, valid: list[str]) -> str:
    """The nearest valid name, then its neighbours: those of the same group, or as many as a line can hold."""
    near = get_close_matches(wrong, valid, n=1, cutoff=0.5)
    group = near[0].rpartition(".")[0] if near else wrong.rpartition(".")[0]
    neighbours = [name for name in valid if name.rpartition(".")[0] == group] or valid
    listed = ", ".join(neighbours[:MAX_LISTED]) + (", ..." if len(neighbours) > MAX_LISTED else "")
    return (f"did you mean '{near[0]}'? " if near else "") + f"valid: {listed}"


def expected(hint: Any) -> str | None:
    """What a type allows, in words; None if that takes more words than a line has."""
    if get_origin(hint) is Literal:
        return f"choose from {', '.join(str(choice) for choice in get_args(hint))}"
    if get_origin(hint) in (Union, types.UnionType):
        parts = [expected(part) for part in get_args(hint)]
        return None if None in parts else " or ".join(part for part in parts if part is not None)
    if hint is type(None):
        return "null"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"choose from {', '.join(hint.__members__)}"
    if isinstance(hint, type) and hint.__module__ in ("builtins", "pathlib"):
        return f"it must be of type {hint.__name__}"
    return None


def typehint_of(action: argparse.Action) -> Any:
    """The type that the parser checks an argument against, if it does."""
    return getattr(action, "_typehint", None)
