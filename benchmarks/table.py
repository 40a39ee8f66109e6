"""Prints a file of results as a Markdown table: `python -m benchmarks.table whole_slide [--columns seconds peak]`.

The pages of the documentation hold such tables; whoever measures again pastes the new one.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from tests.conftest import RESULTS


def rows(name: str) -> dict[str, dict[str, Any]]:
    """Each case of a file of results, with its figures; nested figures have joined names."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    listed = {row["name"]: row for row in record.get("rows", [])}
    cases = record.get("cases") or listed or {name: record["values"]}
    return {case: dict(flat(values)) for case, values in cases.items()}


def flat(values: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        if key == "machine":
            continue
        if isinstance(value, dict):
            found += flat(value, f"{before}{key} ")
        elif not isinstance(value, list):
            found.append((before + key, value))
    return found


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|").replace("\n", " ")


def table(name: str, columns: list[str]) -> str:
    """A Markdown table with a row for each case and the given columns, or all."""
    found = rows(name)
    names = columns or list(dict.fromkeys(key for values in found.values() for key in values))
    lines = [["case", *names], ["---"] * (len(names) + 1)]
    lines += [[case, *(cell(values.get(key, "")) for key in names)] for case, values in found.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(path.stem for path in RESULTS.glob("*.json")), metavar="NAME")
    parser.add_argument("--columns", nargs="*", default=[], help="default: all")
    options = parser.parse_args()
    print(table(options.name, options.columns))


if __name__ == "__main__":
    main()
