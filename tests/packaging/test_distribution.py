"""The wheel holds the two packages and nothing else, and works where it is installed."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from an sdist of this tree with the build backend that is installed here."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = folder.glob("*.whl")
    return path


def environment(folder: Path, wheel: Path) -> Path:
    """The commands of a clean environment that holds only the wheel: not even its requirements."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    return folder / "bin"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("clean"), wheel)


def clean_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


def test_wheel_holds_only_the_two_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lightning_plugin", "wsi_trainer"}
    assert "wsi_trainer/py.typed" in names
    assert "lightning_plugin/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    shipped = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert {name.removeprefix("wsi_trainer/configs/") for name in names if "/configs/" in name} == shipped


def test_help_works_without_any_requirement(installed, tmp_path):
    run = subprocess.run(
        [installed / "wsi-train", "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(),
    )
    assert run.returncode == 0, run.stderr
    assert "usage: wsi-train COMMAND" in run.stdout


def test_a_config_of_the_package_is_found_where_the_folder_has_none(installed, wheel, tmp_path):
    program = "import sys; from wsi_trainer.cli import *; print(*with_own_configs(sys.argv[1:]))"

    def words(binaries: Path, *given: str) -> str:
        command = [binaries / "python", "-c", program, *given]
        run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean_environment())
        return run.stdout.strip()

    def found(binaries: Path) -> Path:
        option, path = words(binaries, "--config=configs/demo.yaml").split("=")
        assert words(binaries, "--config", "configs/demo.yaml") == f"{option} {path}"
        return Path(path)

    shipped = found(installed)
    assert shipped.is_relative_to(installed.parent)
    assert shipped.read_text() == (ROOT / "configs" / "demo.yaml").read_text()
    editable = environment(tmp_path / "clean", wheel)
    (site,) = editable.parent.glob("lib/python*/site-packages")
    for path in (site / "wsi_trainer").iterdir():  # hatchling leaves a copy of the configs beside the .pth file
        if path.name != "configs":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (site / "clone.pth").write_text(f"{ROOT}\n")
    assert found(editable) == ROOT / "configs" / "demo.yaml"
    for other in ("--config=./configs/demo.yaml", "--config configs/none.yaml", "--data.manifest configs/demo.yaml"):
        assert words(installed, *other.split()) == other
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").touch()
    assert words(installed, "--config=configs/demo.yaml") == "--config=configs/demo.yaml"


def test_importing_the_engine_imports_neither_the_application_nor_lightning():
    program = "import lightning_plugin, json, sys; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    modules = json.loads(run.stdout.splitlines()[-1])
    assert "lightning_plugin" in modules
    assert [name for name in ("wsi_trainer", "openslide") if name in modules] == []
    assert [name for name in modules if "lightning" in name and not name.startswith("lightning_plugin")] == []


def test_only_the_extra_of_networks_brings_torchvision():
    assert "torchvision" not in (ROOT / "constraints.txt").read_text()
    lines = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if '"torchvision' in line]
    assert len(lines) == 1 and lines[0].startswith("networks = ")


def test_constraints_name_no_cuda_package():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in lines
    assert [line for line in lines if line.startswith(("nvidia-", "cuda-", "triton"))] == []
