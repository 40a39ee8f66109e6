"""Writes the pages of the reference from the code: one for each module, and one for the command line."""

import ast
import contextlib
import importlib
import inspect
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from wsi_trainer.cli import main
from wsi_trainer.cli.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"lightning_plugin": "The engine", "wsi_trainer": "The application"}


def write_reference(folder: Path) -> None:
    """Make the folder anew: an index, the commands, and a page for each module."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "commands.md").write_text(commands_page())
    index = ["# Reference", "Made from the code.", toctree("The command line", ["commands"])]
    for package, title in PACKAGES.items():
        names = list(modules(package))
        for name in names:
            (folder / f"{name}.rst").write_text(module_page(name))
        index.append(toctree(title, names))
    (folder / "index.md").write_text("\n\n".join(index) + "\n")


def modules(package: str) -> Iterator[str]:
    """The dotted name of each public module that says what it is."""
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        # What is private of PyTorch is documented there.
        hidden = any(part.startswith("_") or part == "private" for part in parts)
        if not hidden and ast.get_docstring(ast.parse(path.read_text())):
            yield ".".join(parts)


def module_page(name: str) -> str:
    """A page whose text autodoc takes from the module: what it defines, or what it exports in `__all__`.

    An inner package shows its exports without indexing them: they are indexed where they are defined.
    """
    inner_package = "." in name and (ROOT / Path(*name.split(".")) / "__init__.py").is_file()
    options = ["members", "show-inheritance", *(["no-index"] if inner_package or hidden_by_export(name) else [])]
    lines = [name, "=" * len(name), "", f".. automodule:: {name}", *(f"   :{option}:" for option in options)]
    return "\n".join(lines) + "\n"


def hidden_by_export(name: str) -> bool:
    """Whether the package exports something else under the module's name, as `lightning_plugin.check`."""
    package, _, last = name.rpartition(".")
    return bool(package) and not inspect.ismodule(getattr(importlib.import_module(package), last, inspect))


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
