"""Writes the pages of the reference from the code: one for each public module, and one for the command line."""

import base64
import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

from wsi_trainer.cli import COMMANDS, main

# Modules whose `__all__`, or whose definitions, are public: what a version promises to keep.
PUBLIC = {
    "The engine": (
        "lightning_plugin",
        "lightning_plugin.options",
        "lightning_plugin.plan",
        "lightning_plugin.strategy",
        "lightning_plugin.rules",
        "lightning_plugin.source",
    ),
    "The application": (
        "wsi_trainer",
        "wsi_trainer.fit.run",
        "wsi_trainer.fit.folder",
        "wsi_trainer.fit.study",
        "wsi_trainer.fit.predictor",
        "wsi_trainer.slide",
        "wsi_trainer.slide.views",
        "wsi_trainer.models",
        "wsi_trainer.metrics",
    ),
}


def write_reference(folder: Path) -> None:
    """Make the folder anew: an index, the commands, and a page for each public module."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "commands.md").write_text(commands_page())
    index = ["# Reference", "Made from the code.", toctree("The command line", ["commands"])]
    for title, names in PUBLIC.items():
        for name in names:
            (folder / f"{name}.rst").write_text(module_page(name))
        index.append(toctree(title, list(names)))
    (folder / "index.md").write_text("\n\n".join(index) + "\n")


def write_notebooks(folder: Path) -> None:
    """Write a page beside each notebook: its text, its code and the outputs that it holds, in order."""
    for path in folder.glob("*.ipynb"):
        parts = [f"```{{note}}\nThis page is [a notebook](https://jupyter.org): `docs/notebooks/{path.name}`.\n```"]
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            language = "sh" if text.startswith("!") else "python"
            parts.append(text if cell["cell_type"] == "markdown" else f"```{language}\n{text}\n```")
            parts += [output_of(output, path.with_suffix(f".{cell['id']}.png")) for output in cell.get("outputs", [])]
        parts[:2] = reversed(parts[:2])  # the title comes first
        path.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def output_of(output: dict[str, Any], picture: Path) -> str:
    """An output of a cell as Markdown; what is a picture is written into a file."""
    data = output.get("data", {})
    if "text/html" in data:
        return f"```{{raw}} html\n{''.join(data['text/html'])}\n```"
    if "image/png" not in data:
        said = "".join(output.get("text", data.get("text/plain", ""))).strip("\n")
        return f"```text\n{said}\n```" if said.strip() else ""
    picture.write_bytes(base64.b64decode("".join(data["image/png"])))
    width = output.get("metadata", {}).get("image/png", {}).get("width")
    size = f":width: {width}px\n" if width else ""
    return f"```{{image}} {picture.name}\n:alt: Output of the cell above.\n{size}```"


def module_page(name: str) -> str:
    """A page whose text autodoc takes from the module: what it exports in `__all__`, or defines."""
    lines = [name, "=" * len(name), "", f".. automodule:: {name}", "   :members:", "   :show-inheritance:"]
    return "\n".join(lines) + "\n"


def toctree(title: str, pages: list[str]) -> str:
    """A heading and a list of pages."""
    return "\n".join([f"## {title}", "", "```{toctree}", ":maxdepth: 1", "", *pages, "```"])


def commands_page() -> str:
    """What `--help` says, for `wsi-train` and for each command that is there."""
    parts = ["# wsi-train", help_of([])]
    for command in COMMANDS:
        if command.target:
            parts += [f"## wsi-train {command.name}", help_of([command.name])]
    return "\n\n".join(parts) + "\n"


def help_of(words: list[str]) -> str:
    """The help text as a block, at one width on every machine."""
    os.environ["COLUMNS"] = "84"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = main([*words, "--help"])
    if code != 0:
        raise RuntimeError(f"wsi-train {' '.join(words)} --help ended with exit code {code}")
    return f"```text\n{shown.getvalue().rstrip()}\n```"
