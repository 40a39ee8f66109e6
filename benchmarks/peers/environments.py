"""Environments of peers that are no part of PyTorch: made once, from the registry, at pinned versions.

Each has the version of PyTorch that the project runs with here, so that the kernels are the same. They lie in `.peers/`
of the repository, each under the pins it was made with; `make clean` removes them.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

FOLDER = Path(__file__).resolve().parents[2] / ".peers"


class NotThere(Exception):
    """An environment that could not be made, and why."""


@dataclass(frozen=True)
class Environment:
    """Installs are lists of arguments of pip, one call after the other."""

    name: str
    installs: tuple[tuple[str, ...], ...]

    @property
    def pins(self) -> tuple[tuple[str, ...], ...]:
        """Installed versions: PyTorch and NumPy of this process first."""
        base = (f"torch=={version('torch').partition('+')[0]}", f"numpy=={version('numpy')}")
        return (base, *self.installs)

    @property
    def folder(self) -> Path:
        key = repr((self.pins, sys.version_info[:2])).encode()
        return FOLDER / f"{self.name}-{hashlib.sha256(key).hexdigest()[:8]}"

    def python(self, console: Console) -> str:
        """The environment's interpreter; made now, if it is not there."""
        folder = self.folder
        interpreter = folder / "bin" / "python"
        ready = folder / "ready"
        if ready.exists():
            return str(interpreter)
        shutil.rmtree(folder, ignore_errors=True)  # what a killed run began
        console.print(f"making the environment of {self.name} in {folder} (some minutes, once)")
        venv.create(folder, with_pip=True)
        for words in self.pins:
            command = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                shutil.rmtree(folder, ignore_errors=True)
                raise NotThere(f"pip install {' '.join(words)}: {last_line(done.stderr)}")
        ready.touch()
        return str(interpreter)


def last_line(text: str) -> str:
    """The last line of an output that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing was said"


#: Its package asks for Lightning and torchvision when it is imported; the streaming network alone needs neither.
LIGHTSTREAM = Environment("lightstream", (("--no-deps", "lightstream==1.0.7"),))
