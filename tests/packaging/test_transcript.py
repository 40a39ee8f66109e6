"""README's commands run in an empty folder and environment with nothing but the wheel; what they print is a page."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial" / "transcript.md"
SLIDES = "from wsi_trainer.synthetic import generate; generate('.', slides=40, side=512, seed=1, tissue=0.6)"
#: More lines of one command than these are left out in the middle.
SHOWN = 30
ABOUT = """\
# What the first commands print

A test runs the commands of the README in an empty folder and an empty environment, with nothing but the wheel and what
it requires, and writes this page. Synthetic slides stand for your own. Behind each command stands the processor time
that it took. Times in its output are those of the clock, on {processors} processors with a load of {load:.0f}.
"""


def commands() -> list[str]:
    """The commands of README's blocks, without the installation, which the test does from the wheel."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    assert lines[0] == "pip install wsi-trainer"
    return lines[1:]


def shown(text: str) -> str:
    """Output as a terminal leaves it: the last state of each bar, no escapes, the middle of long tables left out."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    lines = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    if len(lines) > SHOWN:
        lines[SHOWN // 2 : -SHOWN // 2] = [f"... {len(lines) - SHOWN} more lines ..."]
    return "\n".join(lines).strip("\n")


@pytest.mark.full
@pytest.mark.slow
def test_readme_runs_with_nothing_but_the_wheel(tmp_path: Path) -> None:
    """Takes some minutes, and the network: pip fetches the requirements."""
    dist, folder, environment = tmp_path / "dist", tmp_path / "study", tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT], check=True)
    (wheel,) = dist.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    pinned = ["--constraint", ROOT / "constraints.txt", wheel]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pinned], check=True)
    run_all(environment / "bin", folder, PAGE)
    assert len(zipfile.ZipFile(wheel).namelist()) > 300


def processor_time() -> float:
    """Return the seconds that all processes started here and ended by now have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_all(binaries: Path, folder: Path, page: Path) -> None:
    """Run the commands in a new folder, and write the page."""
    folder.mkdir()
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "PIP_CACHE_DIR") if name in os.environ}
    variables = {**kept, "PATH": f"{binaries}:/usr/bin:/bin", "COLUMNS": "100", "PYTHONUTF8": "1"}
    subprocess.run([binaries / "python", "-c", SLIDES], cwd=folder, env=variables, check=True)
    (folder / "manifest.csv").rename(folder / "slides.csv")
    parts = []
    for command in commands():
        before = processor_time()
        # README's commands, in README's own shell.
        done = subprocess.run(
            ["/bin/sh", "-c", command], cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"
        said = re.sub(r" on Linux-\S+", " on Linux", done.stdout.replace(f"{folder}/", ""))
        parts.append(f"`{command}` ({processor_time() - before:.0f} s)\n\n```text\n{shown(said)}\n```\n")
    about = ABOUT.format(processors=os.cpu_count(), load=os.getloadavg()[2])
    page.write_text("\n".join([about, *parts]), encoding="utf-8")
