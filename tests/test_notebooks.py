"""The notebooks run from the first cell to the last, each in an empty folder, and hold their outputs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "docs" / "notebooks").glob("*.ipynb"))
#: Notebooks of Python alone, whose cells run here; with `--full` all run in a kernel of their own.
SHORT = ("does-it-fit", "plan-by-hand")


def cells_of(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_notebooks_hold_the_outputs_of_a_run_from_first_to_last_and_are_small() -> None:
    assert len(NOTEBOOKS) == 5
    for path in NOTEBOOKS:
        cells = cells_of(path)
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), path.name
        outputs = [output for cell in cells for output in cell["outputs"]]
        assert outputs and not [output for output in outputs if output["output_type"] == "error"], path.name
        text = json.dumps([output for output in outputs if output["output_type"] == "stream"])
        assert "/tmp/" not in text and "/home/" not in text, f"{path.name} shows a folder of the machine that ran it"
        assert path.stat().st_size < 400_000, path.name


def test_notebooks_show_a_plan_a_sweep_a_slide_and_its_attention() -> None:
    pictures = {
        path.stem: sum("image/png" in output.get("data", ()) for cell in cells_of(path) for output in cell["outputs"])
        for path in NOTEBOOKS
    }
    assert pictures["does-it-fit"] == 2 and pictures["slides-to-report"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_the_cells_of_a_notebook_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = cells_of(next(path for path in NOTEBOOKS if path.stem == name))
    program = "\n\n".join("".join(cell["source"]) for cell in cells)
    exec(compile(program, name, "exec", dont_inherit=True), {"__name__": name})


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    # Cells with `!wsi-train` find the command of this environment.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    said = "".join(output.get("text", "") for output in outputs)
    assert outputs and "wsi-train: error" not in said, said[-2000:]
