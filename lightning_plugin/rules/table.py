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

#: Where several families have a rule for a function, they are asked in this order, whichever was imported first: the
#: first that knows the arguments answers.
ORDER: dict[str, str] = {
    "instances": "that single images, put side by side, are several is an axis; to all others it is a plain number",
    "channels": "what leaves space as it is needs no halo and no pass of its own",
    "window": "a convolution is plain far more often than transposed",
    "picking": "along an axis, by known numbers",
    "lookup": "a table that is looked up is a vector; what is picked out of a map comes later",
    "reduce": "over all of space: one pass over the tiles makes a vector",
    "axes": "over some of the axes: the others are still tiled",
    "adaptive": "to more than the one position that `reduce` makes",
    "transposed": "what `window` declines",
    "slices": "parts of space, where `channels` found no part of the channels",
    "rearrange": "space put together or turned round, likewise",
    "positions": "a softmax over all of space, where `axes` had no axis left to tile",
    "ranking": "the best and the picked of all positions",
    "pooling": "windows of space, likewise",
    "unfold": "windows of space, likewise",
    "pad": "the borders of space, likewise",
    "interpolate": "space made larger or smaller, likewise",
    "shuffle": "space and channels, likewise",
    "carried": "plain dimensions that windows slide over, where the families above found no space",
    "spellings": "rarer spellings, put down to the operators above",
}


@dataclass(frozen=True)
class Chain:
    """Rules for one function, in the order in which they are asked."""

    rules: tuple[Rule, ...]

    def __call__(self, *call: Any) -> Any:
        for rule in self.rules:
            result = rule(*call)
            if result is not NotImplemented:
                return result
        return NotImplemented


@dataclass(frozen=True)
class Entry:
    """A rule of a family; ``kind`` is what the page of operators says of it."""

    family: str
    kind: str
    rule: Rule

    @property
    def rank(self) -> int:
        """Its place in `ORDER`; a family of a user's is asked last."""
        return list(ORDER).index(self.family) if self.family in ORDER else len(ORDER)


class RuleTable:
    """The rules for each function, by family, that refuses to be overwritten by accident."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: dict[Any, tuple[Entry, ...]] = {}
        self.of_vectors: dict[Any, Rule] = {}
        self.stand_ins: dict[Any, Callable[..., Any]] = {}
        self.enlargers: dict[Any, Rule] = {}
        self._asked: dict[Any, Rule] = {}

    def rule(self, *functions: Any, kind: str = "", replace: bool = False) -> Callable[[Rule], Rule]:
        """Register the decorated rule for these functions (an operator packet stands for all its overloads)."""

        def add(rule: Rule) -> Rule:
            for function in functions:
                if replace:
                    self.entries.pop(function, None)
                elif any(not self.share(e.family, family(rule)) for e in self.entries.get(function, ())):
                    raise ValueError(f"{self.name} has a rule for {function} already; pass replace=True to change it")
                self.add(function, rule, kind)
            return rule

        return add

    def otherwise(self, *functions: Any, kind: str = "") -> Callable[[Rule], Rule]:
        """Register the decorated rule for calls that all others decline."""

        def add(rule: Rule) -> Rule:
            for function in functions:
                self.add(function, rule, kind)
            return rule

        return add

    @staticmethod
    def share(one: str, other: str) -> bool:
        """Whether two families may both have a rule for a function."""
        return one != other and one in ORDER and other in ORDER

    def add(self, function: Any, rule: Rule, kind: str) -> None:
        entry = Entry(family(rule), kind or family(rule), rule)
        known = sorted((*self.entries.get(function, ()), entry), key=lambda e: e.rank)
        self.entries[function] = tuple(known)
        self._asked[function] = rule if len(known) == 1 else Chain(tuple(e.rule for e in known))

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

    def on_vectors(self, *functions: Any) -> Callable[[Rule], Rule]:
        """Register the rule for calls on vectors alone that do more than return a result."""

        def add(rule: Rule) -> Rule:
            for function in functions:
                self.of_vectors[function] = rule
            return rule

        return add

    def get(self, function: Any) -> Rule | None:
        found = self._asked.get(function)
        if found is None:
            found = self._asked.get(getattr(function, "overloadpacket", None))
        return found


def family(rule: Rule) -> str:
    """The file that a rule is in."""
    return rule.__module__.rsplit(".", 1)[-1]


ATEN = RuleTable("ATEN")
API = RuleTable("API")


def filled(args: Any, *defaults: Any) -> Any:
    """Positional arguments with the defaults of those that were left out."""
    return [*args, *defaults[len(args) :]]
