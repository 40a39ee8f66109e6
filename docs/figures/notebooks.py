"""Runs the notebooks and keeps their outputs in them: `python docs/figures/notebooks.py [NAME ...]`, some minutes.

GitHub and the pages that `make docs` builds show these outputs; no build of the pages runs a notebook.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def main(names: list[str]) -> None:
    """Run the named notebooks, or all, each in an empty folder."""
    # Cells with `!wsi-train` find the command of this environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=resources).execute()
        for cell in notebook.cells:
            cell.metadata = {}
            if cell.cell_type == "code":
                cell.outputs = shown(cell.outputs)
        notebook.metadata.pop("language_info", None)
        nbformat.write(notebook, path)


def shown(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """The outputs of a cell as a reader sees them at its end: one text, no colours, no bars of progress, no logs."""
    kept = [output for output in outputs if output.get("name") != "stderr"]
    text = ANSI.sub("", "".join(output.text for output in kept if output.output_type == "stream"))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if "━" not in line or "┏" in line or "┡" in line]
    said = "\n".join(line for line in lines if line)
    first = [nbformat.v4.new_output("stream", name="stdout", text=said + "\n")] if said else []
    return first + [output for output in kept if output.output_type != "stream"]


if __name__ == "__main__":
    main(sys.argv[1:])
