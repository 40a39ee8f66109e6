"""Tables of rules.

A *rule* records a call. It gets the recorder and the call, whose tensors are values of the recording. It returns the
values of the results, or `NotImplemented` to decline the call, which then is a barrier::

    from lightning_plugin.rules import ATEN

    @ATEN.rule(torch.ops.mylib.swirl.default)
    def swirl(rec, func, args, kwargs, outs):
        x, = args
        return rec.emit(Swirl(...), [x], outs, x.layout)

``outs`` are the results as fake tensors, which have shapes and types and no data.

`ATEN` has the rules of operators as PyTorch's dispatcher sees them. `API` has those of Python functions as the user
calls them, for functions that are easier to tile whole than operator by operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_plugin.private import decomposition_table

if TYPE_CHECKING:  # the recorder of a call, which asks the rules
    from lightning_plugin.capture.record import Recorder as Recorder
else:
    Recorder = Any

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """Entry of a table.

    Attributes:
        rule: Records calls on maps.
        kind: Kind of the rule, for the page of operators.
        on_vectors: Records calls on vectors alone; for functions that do more than return a result.
        stand_in: Runs on fake tensors in place of a function that looks at data.
        enlarges: The operator may make a vector as large as a map. The rule then gets the vector as a map, so that the
            result is not held whole.
    """

    rule: Rule
    kind: str
    on_vectors: Rule | None = None
    stand_in: Callable[..., Any] | None = None
    enlarges: bool = False


class RuleTable:
    """Rules by function, one for each: an operator, an operator packet for all its overloads, or one of PyTorch's tags
    for all operators that have it and no rule of their own.

    Attributes:
        entries: The rules.
        changes: Number of times that rules were registered.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: dict[Any, Entry] = {}
        self.changes = 0

    def rule(self, *functions: Any, replace: bool = False, **fields: Any) -> Callable[[Rule], Rule]:
        """Register the decorated rule for functions.

        Args:
            functions: The functions.
            replace: Replace rules that are registered already, which is an error otherwise.
            fields: Further fields of `Entry`. The kind is the name of the rule's module by default.
        """

        def add(rule: Rule) -> Rule:
            for function in functions:
                former = self.entries.get(function)
                if former is not None and not replace:
                    raise ValueError(f"{self.name} has a rule for {function} already; pass replace=True to change it")
                entry = former or Entry(rule, rule.__module__.rsplit(".", 1)[-1])
                self.entries[function] = dataclasses.replace(entry, rule=rule, **fields)
            self.changes += 1
            return rule

        return add

    def otherwise(self, *functions: Any, **fields: Any) -> Callable[[Rule], Rule]:
        """Register the decorated rule for calls that the present rule declines."""

        def add(rule: Rule) -> Rule:
            for function in functions:
                former = self.get(function)
                new = rule if former is None else either(former, rule)
                self.rule(function, replace=True, **fields)(new)
            return rule

        return add

    def entry(self, function: Any) -> Entry | None:
        """Return the entry of a function, of its packet, or of one of its tags."""
        found = self.entries.get(function) or self.entries.get(getattr(function, "overloadpacket", None))
        tags = getattr(function, "tags", ()) if found is None else ()
        return next((self.entries[tag] for tag in tags if tag in self.entries), found)

    def get(self, function: Any) -> Rule | None:
        found = self.entry(function)
        return None if found is None else found.rule


def decomposed(rec: Recorder, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> Any:
    """Record PyTorch's own decomposition, for operators whose derivative it has everywhere.

    Not all decompositions do: that of a norm gives NaN at zero, since PyTorch decomposes below autograd.
    """
    return rec.decompose(decomposition_table[func], *args, **kwargs)


def either(first: Rule, second: Rule) -> Rule:
    """Return a rule that asks two others, the second if the first declines."""

    def rule(*call: Any) -> Any:
        found = first(*call)
        return second(*call) if found is NotImplemented else found

    return rule


ATEN = RuleTable("ATEN")
API = RuleTable("API")
