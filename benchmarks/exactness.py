"""Measure exactness and write what was measured: `python -m benchmarks.exactness [zoo] [timm] [transformers]`.

`zoo` runs every network of the tests in both modes at two sizes, `timm` and `transformers` the models of these
libraries; each writes a file of benchmarks/results.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from tests.conftest import RESULTS, environment
from tests.exactness import errors
from tests.lightning_plugin.architectures import ARCHITECTURES, examine
from tests.lightning_plugin.cases import GRIDS, noting, still
from tests.lightning_plugin.models_of_transformers import MODELS
from tests.lightning_plugin.models_of_transformers import examine as examine_model
from tests.zoo import STRUCTURED, ZOO, ZooEntry, fill

KINDS = ["zoo", "timm", "transformers"]


def zoo_row(entry: ZooEntry) -> dict[str, Any]:
    """The largest errors of a network over modes, sizes and grids, and what was run whole."""
    found: dict[str, float] = {}
    noted: set[str] = set()
    for mode in (True, False):
        for shape, grids in ((entry.shape, GRIDS[0]), (entry.other_shape, GRIDS[1])):
            engine = noting(*grids)
            net = still(fill(entry.build().double())).train(mode)
            for name, error in errors(net, shape, engine=engine).items():
                kind = name.split()[0] if name.split()[0] in ("loss", "output", "input", "buffer") else "parameter"
                found[kind] = max(found.get(kind, 0.0), error)
            noted |= {b.split(" in ")[0].split(": ")[0] for b in engine.noted}
    return {"name": entry.name, "shape": list(entry.shape), "errors": found, "barriers": sorted(noted)}


def zoo() -> list[dict[str, Any]]:
    entries = [*ZOO.values(), *STRUCTURED.values()]
    return [zoo_row(e) for e in track(entries, "zoo")]


def timm() -> list[dict[str, Any]]:
    import tests.torchvision_stub  # noqa: F401  # before timm

    library = importlib.import_module("timm")

    return [examine(library, a) for a in track(ARCHITECTURES, "timm")]


def transformers() -> list[dict[str, Any]]:
    import transformers as library

    return [examine_model(library, m) for m in track(MODELS, "transformers")]


def keep(name: str, rows: list[dict[str, Any]]) -> Path:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"exactness_{name}.json"
    path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=KINDS, help="default: all")
    chosen = parser.parse_args().what or KINDS
    for path in run(chosen):
        print(path)


def run(chosen: list[str]) -> Iterator[Path]:
    torch.set_num_threads(1)  # networks are tiny: threads would only wait for each other
    if "zoo" in chosen:
        yield keep("zoo", zoo())
    if "timm" in chosen:
        yield keep("timm", timm())
    if "transformers" in chosen:
        yield keep("transformers", transformers())


if __name__ == "__main__":
    main()
