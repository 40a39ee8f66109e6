"""Writes the table of operators: what has a rule, of which kind, and which tests reach it."""

import json
from pathlib import Path

import torch

from lightning_plugin.private import custom_function
from lightning_plugin.rules import API, ATEN

ROOT = Path(__file__).resolve().parents[1]
COVERAGE = ROOT / "benchmarks" / "results" / "operators.json"

HEAD = """# Operators

Every operator that runs tile by tile, the kind of its rule, and the test files in which the rule has answered. All of
these tests compare with plain PyTorch in float64. *Functions* are recorded as the user calls them, *operators* as
PyTorch's dispatcher sees them, where the many spellings of an operator have become one. A function that is not in the
table is recorded as the operators that it is made of. Where one of them has no rule for the call, the whole function is
a barrier: it runs whole, exactly, and the plan names it.

Besides those in the table, every operator that PyTorch itself tags as pointwise (`torch.Tag.pointwise`) is local: sums,
products, comparisons, activations, special functions.

This page is made from the tables of rules and from `benchmarks/results/operators.json`, which
`pytest --operators tests/lightning_plugin` writes.
"""


def name_of(function: object) -> str:
    packet = custom_function(function) or getattr(function, "overloadpacket", function)
    return str(getattr(packet, "__name__", packet)).removeprefix("aten.")


def write_operators(page: Path) -> None:
    """Write the page."""
    reached = json.loads(COVERAGE.read_text()) if COVERAGE.exists() else {}
    lines = [HEAD]
    for table, title in ((API, "Functions"), (ATEN, "Operators")):
        kinds: dict[str, set[str]] = {}
        for function, entry in table.entries.items():
            if isinstance(function, torch.Tag):
                continue
            kinds.setdefault(name_of(function), set()).add(entry.kind)
        lines += [f"## {title}", "", "| name | kind of rule | reached in |", "|---|---|---|"]
        for name in sorted(kinds):
            files = reached.get(f"{table.name} {name}", [])
            tests = ", ".join(f"`{f}`" for f in files) or "no test reaches it"
            lines.append(f"| `{name}` | {', '.join(sorted(kinds[name]))} | {tests} |")
        lines.append("")
    page.write_text("\n".join(lines))


if __name__ == "__main__":
    write_operators(ROOT / "docs" / "operators.md")
