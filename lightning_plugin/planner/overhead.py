"""Less of Python's overhead in planning: methods that answer each question once, and no search for cycles.

Answers lie in the object that was asked, and hold no reference to it: they go when it goes, without waiting for
Python's collector of cycles. (`functools.cache` on a bound method keeps its object alive.)

[Note: collector] The collector looks at all that a process holds, the modules of PyTorch too, whenever some hundreds of
objects were made, and a search makes millions that no cycle holds: that takes a sixth of its time. And memory that a
rehearsal lets go is counted where it goes; what waited for a collector would be counted wherever that came by, in one
process here, in another there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

Self = TypeVar("Self")
Args = ParamSpec("Args")
Found = TypeVar("Found")


def memoized(method: Callable[Concatenate[Self, Args], Found]) -> Callable[Concatenate[Self, Args], Found]:
    """A method whose results are memoized by its arguments, which are given by position."""
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


@contextmanager
def without_gc() -> Iterator[None]:
    """A block without automatic garbage collection of cycles."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
