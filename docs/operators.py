"""Writes the table of operators: what has a rule, of which kind, and which tests reach it."""

import json
from pathlib import Path

import torch

from lightning_plugin.private import custom_function
from lightning_plugin.rules import API, ATEN

ROOT = Path(__file__).resolve().parents[1]
COVERAGE = ROOT / "benchmarks" / "results" / "operators.json"

HEAD = """# Operators

Is an operator run tile by tile? It is, if it is in one of the tables below, or if PyTorch tags it as pointwise
(`torch.Tag.pointwise`: sums, products, comparisons, activations, special functions). A function that is not in the
tables is recorded as the operators that it is made of. Where one of them has no rule for the call, the whole function
is a *barrier*: it runs whole, exactly, and the plan names it. `print(make_plan(net, shape, budget="8GiB"))` says so of
your own network.

| kind of rule | how it runs | for example |
|---|---|---|
| local | a tile of the result from the same tile of the input | activations, layers over channels |
| window | from the tile and a halo around it | convolutions, pooling |
| resample | from the tile at another scale, with a halo | interpolation, adaptive pooling |
| layout, views, slices | the same values at other positions | padding, flips, rolls, reshapes |
| attention | a tile of queries with all keys and values | fused attention |
| reduce | tile by tile, added up to a vector | means, sums, maxima, losses |
| broadcast | each tile with a vector that a reduction made | BatchNorm |

Two kinds of a rule, as in *local or reduce*, depend on the dimensions of the call: a mean over channels is local, one
over space is a reduction.

The tables are made from the rules themselves. *Functions* are recorded as the user calls them, *operators* as PyTorch's
dispatcher sees them, where the many spellings of an operator have become one. The last column names tests in which the
rule has answered, those of rules first; all compare with plain PyTorch in float64.
`benchmarks/results/operators.json`, which `pytest --operators tests/lightning_plugin` writes, has all of them.
"""
#: Test files of one rule that are named; the others are counted.
SHOWN = 3
RULE_TESTS = {path.name for path in (ROOT / "tests" / "lightning_plugin" / "rules").glob("test_*.py")}


def name_of(function: object) -> str:
    packet = custom_function(function) or getattr(function, "overloadpacket", function)
    return str(getattr(packet, "__name__", packet)).removeprefix("aten.")


def named(files: list[str]) -> str:
    """Name a few of the test files, those of rules first, and count the others."""
    first = sorted(files, key=lambda file: (file not in RULE_TESTS, file))
    more = [f"{len(files) - SHOWN} more"] if len(files) > SHOWN else []
    return ", ".join([*(f"`{file}`" for file in first[:SHOWN]), *more]) or "no test reaches it"


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
        lines += [f"## {title}", "", "| name | kind of rule | tests |", "|---|---|---|"]
        for name in sorted(kinds):
            files = reached.get(f"{table.name} {name}", [])
            lines.append(f"| `{name}` | {', '.join(sorted(kinds[name]))} | {named(files)} |")
        lines.append("")
    page.write_text("\n".join(lines))


if __name__ == "__main__":
    write_operators(ROOT / "docs" / "operators.md")
