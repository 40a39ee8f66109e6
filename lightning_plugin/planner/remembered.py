"""Methods that answer each question once.

The answers lie in the object that was asked, and hold no reference to it: they go when it goes, without waiting for
Python's collector of cycles. (`functools.cache` on a bound method keeps its object alive.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

Self = TypeVar("Self")
Args = ParamSpec("Args")
Found = TypeVar("Found")


def remembered(method: Callable[Concatenate[Self, Args], Found]) -> Callable[Concatenate[Self, Args], Found]:
    """A method whose results are kept by its arguments, which are given by position."""
    name = f"answers of {method.__name__}"

    @wraps(method)
    def ask(self: Any, *args: Any) -> Any:
        try:
            return self.__dict__[name][args]
        except KeyError:
            pass
        found = method(self, *args)  # type: ignore[call-arg]
        self.__dict__.setdefault(name, {})[args] = found
        return found

    return ask  # type: ignore[return-value]
