"""The tables of rules, and how to add one.

A *rule* gets the recorder and a call whose tensors are values, and answers with the values of its results, or with
`NotImplemented` where it does not know these arguments (the call is then a barrier)::

    from lightning_plugin.rules import ATEN

    @ATEN.rule(torch.ops.mylib.swirl.default)
    def swirl(rec, func, args, kwargs, outs):
        x, = args
        return rec.emit(Swirl(...), [x], outs, x.layout)

`ATEN` is asked for operators as the dispatcher sees them, `API` for Python functions as the user calls them, where
the function says more than its pieces do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_plugin.private import decomposition_table

if TYPE_CHECKING:  # the recorder of a call, which asks the rules
    from lightning_plugin.capture.record import Recorder as Recorder
else:
    Recorder = Any

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """A rule; ``kind`` is what the page of operators says of it."""

    kind: str
    rule: Rule


class RuleTable:
    """One rule for each function, that refuses to be overwritten by accident; ``pointwise`` is for operators without
    one that PyTorch tags as that."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: dict[Any, Entry] = {}
        self.of_vectors: dict[Any, Rule] = {}
        self.stand_ins: dict[Any, Callable[..., Any]] = {}
        self.enlargers: dict[Any, Rule] = {}
        self.pointwise: Rule | None = None

    def rule(self, *functions: Any, kind: str = "", replace: bool = False) -> Callable[[Rule], Rule]:
        """Register the decorated rule for these functions (an operator packet stands for all its overloads)."""

        def add(rule: Rule) -> Rule:
            for function in functions:
                if function in self.entries and not replace:
                    raise ValueError(f"{self.name} has a rule for {function} already; pass replace=True to change it")
                self.entries[function] = Entry(kind or rule.__module__.rsplit(".", 1)[-1], rule)
            return rule

        return add

    def otherwise(self, *functions: Any, kind: str = "") -> Callable[[Rule], Rule]:
        """Register the decorated rule for calls that the function's own declines."""

        def add(rule: Rule) -> Rule:
            for function in functions:
                former = self.get(function)
                self.rule(function, kind=kind, replace=True)(rule if former is None else either(former, rule))
            return rule

        return add

    def enlarging(self, *functions: Any) -> Callable[[Rule], Rule]:
        """Register what makes a map of a call on a vector whose result is as large as a map of the recording."""
        return entering(self.enlargers, functions)

    def stand_in(self, function: Any) -> Callable[[Rule], Rule]:
        """Record the decorated function in place of one that looks at values, which no recording has."""
        return entering(self.stand_ins, [function])

    def on_vectors(self, *functions: Any) -> Callable[[Rule], Rule]:
        """Register the rule for calls on vectors alone that do more than return a result."""
        return entering(self.of_vectors, functions)

    def get(self, function: Any) -> Rule | None:
        found = self.entries.get(function) or self.entries.get(getattr(function, "overloadpacket", None))
        if found is None and torch.Tag.pointwise in getattr(function, "tags", ()):
            return self.pointwise
        return None if found is None else found.rule


def entering(table: dict[Any, Rule], functions: Sequence[Any]) -> Callable[[Rule], Rule]:
    """A decorator that enters what it decorates for these functions."""

    def add(rule: Rule) -> Rule:
        table.update(dict.fromkeys(functions, rule))
        return rule

    return add


def decomposed(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """PyTorch's own decomposition, of operators of which it has the operator's derivative everywhere.

    Others have not: that of a norm gives NaN at zero, since PyTorch decomposes behind autograd.
    """
    return rec.decompose(decomposition_table[func], *args, **kwargs)


def either(first: Rule, second: Rule) -> Rule:
    """A rule that asks two others, the second where the first declines."""

    def rule(*call: Any) -> Any:
        found = first(*call)
        return second(*call) if found is NotImplemented else found

    return rule


ATEN = RuleTable("ATEN")
API = RuleTable("API")
