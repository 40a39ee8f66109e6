"""Rules for one function are asked in the order of the table, whoever registered first; nothing is overwritten."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lightning_plugin.rules import ALONE, API, ATEN, ORDER
from lightning_plugin.rules.table import Rule, RuleTable

NAMES = [family.__name__ for family in ORDER]


def rule_of(family: str, answer: Any) -> Rule:
    def rule(*call: Any) -> Any:
        return answer

    rule.__module__ = family if "." in family else f"lightning_plugin.rules.{family}"
    return rule


def test_the_order_of_registration_does_not_matter() -> None:
    entries = [(f, e) for f, known in ATEN.entries.items() for e in known]
    random.Random(0).shuffle(entries)
    table = RuleTable("again")
    table.order(NAMES)
    for function, entry in entries:
        table.rule(function, kind=entry.kind)(entry.rule)
    assert table.entries == ATEN.entries


def test_where_several_families_know_a_function_they_are_in_the_list() -> None:
    several = {e.family for table in (API, ATEN) for known in table.entries.values() if len(known) > 1 for e in known}
    assert several == set(NAMES) and not several & {family.__name__ for family in ALONE}


def test_the_first_that_knows_the_arguments_answers() -> None:
    table = RuleTable("ours")
    table.rule(abs)(rule_of("axes", "axes"))
    table.rule(abs)(rule_of("channels", NotImplemented))
    table.rule(abs)(rule_of("reduce", "reduce"))
    assert table.get(abs)() == "axes"  # type: ignore[misc]
    table.order(NAMES)
    assert table.get(abs)() == "reduce"  # type: ignore[misc]


def test_nothing_is_overwritten_by_accident() -> None:
    table = RuleTable("ours")
    table.rule(abs)(rule_of("channels", NotImplemented))
    for family in ("channels", "somewhere.mylib"):
        with pytest.raises(ValueError, match=r"has a rule for .* already; pass replace=True"):
            table.rule(abs)(rule_of(family, 1))
    table.otherwise(abs)(rule_of("somewhere.mylib", "last"))
    assert table.get(abs)() == "last"  # type: ignore[misc]
    table.rule(abs, replace=True)(rule_of("somewhere.mylib", "alone"))
    assert table.get(abs)() == "alone" and len(table.entries[abs]) == 1  # type: ignore[misc]
