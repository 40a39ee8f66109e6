"""A folder of `save_pretrained` predicts to the bit with nothing but it, safetensors and what the wheel requires."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.wsi_trainer.small import VGG
from wsi_trainer.cli import main
from wsi_trainer.fit.predictor import Predictor
from wsi_trainer.synthetic import generate

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = [*PROJECT["dependencies"], "safetensors"]
#: No network, and a folder that may only be read, also for root.
ALONE = """
import os, sys

folder = os.path.realpath(sys.argv[1])


def refuse(event, given):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise OSError("there is no network")
    changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.link", "os.symlink")
    if event == "open":
        changes = bool(given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    path = given[0] if given and isinstance(given[0], (str, bytes, os.PathLike)) else ""
    if changes and os.path.realpath(os.fsdecode(path)).startswith(folder):
        raise PermissionError(f"{event} of {given[0]}, which may only be read")


sys.addaudithook(refuse)
"""
PREDICT = """
import json
import torch
import wsi_trainer as wt

absent = ("huggingface_hub", "timm", "transformers", "pandas", "h5py")
torch.set_num_threads(int(sys.argv[3]))
found = wt.Predictor.from_pretrained(folder).predict(sys.argv[2])
there = [name for name in absent if name in sys.modules]
print(json.dumps([there, found.to_dict(), found.decision, found.attention.weights.tolist(), wt.__file__]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of an exported model, and a slide; the run is gone."""
    folder = tmp_path_factory.mktemp("model")
    manifest = generate(folder / "slides", slides=8, side=128, seed=1)
    more = ["--model.head=abmil", "--train.epochs=1", "--train.budget=8MiB", "--train.decision=balanced_accuracy"]
    words = [f"--data.manifest={manifest}", f"--out={folder / 'run'}", *VGG, *more, "--train.accelerator=cpu"]
    assert main(["fit", *words, "--train.resamples=10", "--train.loggers=[csv]"]) == 0
    assert main(["export", str(folder / "run"), f"--out={folder / 'exported'}"]) == 0
    shutil.rmtree(folder / "run")
    return folder / "exported", folder / "slides" / "slides" / "slide_0000.tif"


def needed() -> set[str]:
    """Names of the distributions that the wheel and safetensors need, here."""
    found: set[str] = set()
    left = [Requirement(one) for one in NEEDED]
    seen: set[tuple[str, str]] = set()
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        if (name, str(sorted(one.extras))) in seen:
            continue
        seen.add((name, str(sorted(one.extras))))
        found.add(name)
        for text in importlib.metadata.requires(name) or ():
            further = Requirement(text)
            if further.marker is None or any(further.marker.evaluate({"extra": e}) for e in ("", *one.extras)):
                left.append(further)
    return found


def bare(folder: Path) -> Path:
    """Links to what the wheel and safetensors need, as the folder of an environment without anything else."""
    folder.mkdir()
    for name in needed():
        found = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(found.locate_file(top))))
    for package in ("lightning_plugin", "wsi_trainer"):
        (folder / package).symlink_to(ROOT / package)
    return folder


def ran(command: Sequence[Path | str], program: str, model: tuple[Path, Path]) -> subprocess.CompletedProcess[str]:
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    words = [*map(str, command), "-c", program, *map(str, model), str(torch.get_num_threads())]
    return subprocess.run(words, capture_output=True, text=True, cwd=model[1].parent, env=environment)


def check(command: Sequence[Path | str], model: tuple[Path, Path]) -> str:
    """Predict alone and compare with what is predicted here; returns where the package was imported from."""
    run = ran(command, ALONE + PREDICT, model)
    assert run.returncode == 0, run.stderr
    there, numbers, decision, weights, package = json.loads(run.stdout.splitlines()[-1])
    own = Predictor.from_pretrained(model[0]).predict(model[1])
    assert there == [] and numbers == own.to_dict() and decision == own.decision
    assert weights == own.attention.weights.tolist()
    return str(package)


@pytest.mark.slow
def test_an_exported_model_predicts_with_what_the_wheel_requires_and_safetensors(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    site = bare(tmp_path / "site")
    command = ["env", f"PYTHONPATH={site}", sys.executable, "-S"]
    assert Path(check(command, model)).is_relative_to(site)
    for broken, said in (
        ("open(folder + '/config.json', 'a')", "may only be read"),
        ("os.remove(folder + '/config.json')", "may only be read"),
        ("import pandas", "No module named 'pandas'"),
        ("import socket; socket.create_connection(('localhost', 1))", "there is no network"),
    ):
        assert said in ran(command, ALONE + broken, model).stderr


@pytest.mark.full
@pytest.mark.slow
def test_it_does_in_an_empty_environment(model: tuple[Path, Path], tmp_path: Path) -> None:
    """Takes some minutes, and the network: pip fetches the requirements."""
    dist, environment = tmp_path / "dist", tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT], check=True)
    (wheel,) = dist.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    pinned = ["--constraint", ROOT / "constraints.txt", wheel, "safetensors"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pinned], check=True)
    assert Path(check([python], model)).is_relative_to(environment)
