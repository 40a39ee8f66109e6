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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Chain:
    """Two rules for one function: the second is asked where the first does not know the arguments."""

    first: Rule
    second: Rule

    def __call__(self, *call: Any) -> Any:
        result = self.first(*call)
        return self.second(*call) if result is NotImplemented else result


class RuleTable:
    """A dictionary from functions to rules that refuses to be overwritten by accident."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rules: dict[Any, Rule] = {}
        self.kinds: dict[Any, str] = {}
        self.effects: dict[Any, Rule] = {}
        self.stand_ins: dict[Any, Callable[..., Any]] = {}
        self.enlargers: dict[Any, Rule] = {}

    def rule(self, *functions: Any, kind: str = "", replace: bool = False) -> Callable[[Rule], Rule]:
        """Register the decorated rule for these functions (an operator packet stands for all its overloads)."""

        def add(rule: Rule) -> Rule:
            for function in functions:
                if function in self.rules and not replace:
                    raise ValueError(f"{self.name} has a rule for {function} already; pass replace=True to change it")
                self.rules[function] = rule
                self.kinds[function] = kind or rule.__module__.rsplit(".", 1)[-1]
            return rule

        return add

    def otherwise(self, *functions: Any) -> Callable[[Rule], Rule]:
        """Register the decorated rule for calls that the rules registered so far decline."""

        def add(rule: Rule) -> Rule:
            for function in functions:
                first = self.rules.get(function)
                self.rules[function] = rule if first is None else Chain(first, rule)
                self.kinds.setdefault(function, rule.__module__.rsplit(".", 1)[-1])
            return rule

        return add

    def enlarging(self, *functions: Any) -> Callable[[Rule], Rule]:
        """Register what makes a map of a call on a vector whose result is as large as a map of the recording."""

        def add(rule: Rule) -> Rule:
            for function in functions:
                self.enlargers[function] = rule
            return rule

        return add

    def stand_in(self, function: Any) -> Callable[[Rule], Rule]:
        """Record the decorated function in place of one that looks at values, which no recording has."""

        def add(other: Rule) -> Rule:
            self.stand_ins[function] = other
            return other

        return add

    def effect(self, *functions: Any) -> Callable[[Rule], Rule]:
        """Register what a call on vectors does besides returning a result."""

        def add(rule: Rule) -> Rule:
            for function in functions:
                self.effects[function] = rule
            return rule

        return add

    def get(self, function: Any) -> Rule | None:
        found = self.rules.get(function)
        if found is None:
            found = self.rules.get(getattr(function, "overloadpacket", None))
        return found


ATEN = RuleTable("ATEN")
API = RuleTable("API")


def filled(args: Any, *defaults: Any) -> Any:
    """Positional arguments with the defaults of those that were left out."""
    return [*args, *defaults[len(args) :]]
