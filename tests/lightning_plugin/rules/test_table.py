"""Each function has one rule; nothing is overwritten by accident, and another may be asked behind it."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_plugin.rules.table import Rule, RuleTable


def answering(answer: Any) -> Rule:
    def rule(*call: Any) -> Any:
        return answer

    return rule


def test_nothing_is_overwritten_by_accident() -> None:
    table = RuleTable("ours")
    table.rule(abs)(answering(NotImplemented))
    with pytest.raises(ValueError, match=r"has a rule for .* already; pass replace=True"):
        table.rule(abs)(answering(1))
    table.otherwise(abs)(answering("last"))
    assert table.get(abs)() == "last"  # type: ignore[misc]
    table.rule(abs, replace=True)(answering("alone"))
    assert table.get(abs)() == "alone" and len(table.entries) == 1  # type: ignore[misc]
    table.otherwise(abs)(answering("last"))
    assert table.get(abs)() == "alone"  # type: ignore[misc]
