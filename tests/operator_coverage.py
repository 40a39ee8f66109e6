"""Which operators' rules answered in which tests: the source of the documentation's table of operators.

``pytest --operators tests/lightning_plugin`` writes benchmarks/results/operators.json. Nothing is judged
here; a rule that no test has reached shows up in the table as such.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest


class OperatorCoverage:
    """A pytest plugin that notes, for every rule that is asked for and answers, the file of the test that ran."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.current = ""
        self.seen: dict[str, set[str]] = defaultdict(set)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        from lightning_plugin.rules.table import RuleTable

        plain = RuleTable.get
        seen = self

        def get(table: Any, function: Any) -> Any:
            rule = plain(table, function)
            if rule is not None and seen.current:
                seen.seen[f"{table.name} {operator_name(function)}"].add(seen.current)
            return rule

        RuleTable.get = get  # type: ignore[method-assign]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.current = Path(str(item.path)).name

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self.current = ""

    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        for name, files in getattr(node, "workeroutput", {}).get("operators", {}).items():
            self.seen[name].update(files)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        found = {name: sorted(files) for name, files in sorted(self.seen.items())}
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["operators"] = found
        elif found:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.target.write_text(json.dumps(found, indent=1) + "\n")


def operator_name(function: Any) -> str:
    """An operator as the table of rules lists it."""
    from lightning_plugin.private import custom_function

    packet = custom_function(function) or getattr(function, "overloadpacket", function)
    return str(getattr(packet, "__name__", packet)).removeprefix("aten.")
