"""Recipes outlive the process: the next one looks plans up, and a file that is not what was written is ignored."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import lightning_plugin.plans
from lightning_plugin import TiledModule
from lightning_plugin.plan import Plan
from lightning_plugin.planner import cache
from lightning_plugin.planner.cache import VARIABLE
from tests.warm import start

BUDGET = "5MiB"
SIZES = ((330, 350), (370, 360), (350, 340))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path / "recipes"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def plans(sizes: Any = SIZES, budget: str = BUDGET) -> list[Plan]:
    """The plans of steps on images of these sizes, by a module that knows of no other."""
    tiled = TiledModule(net(), budget=budget)
    found = []
    for size in sizes:
        tiled.zero_grad(set_to_none=True)
        tiled(torch.zeros(1, 3, *size)).sum().backward()
        assert tiled.plan is not None
        found.append(tiled.plan)
    return found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """The name and the content of a file of recipes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("cache")))
        plans(SIZES[:1])
        (path,) = (Path(os.environ[VARIABLE]) / "recipes").glob("*.json")
        return path.name, path.read_bytes()


@pytest.fixture
def written(kept: Path, recipe: tuple[str, bytes]) -> Path:
    """That file, in a folder of its own."""
    kept.mkdir()
    (kept / recipe[0]).write_bytes(recipe[1])
    return kept / recipe[0]


def texts(found: list[Plan]) -> list[str]:
    """Plans with all their figures."""
    return [plan.to_json() for plan in found]


def refuse(*args: Any) -> Any:
    raise AssertionError("it is searched for again")


@pytest.mark.slow
def test_the_next_module_looks_up_what_was_planned(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plans()
    assert len(list(kept.glob("*.json"))) == 1
    monkeypatch.setattr(lightning_plugin.plans, "choose_recipe", refuse)
    assert texts(plans()) == texts(first)


def test_the_next_process_looks_up_what_was_planned(kept: Path, tmp_path: Path) -> None:
    expected = plans()[-1]
    log, found = tmp_path / "log.txt", tmp_path / "plan.json"
    process = start(log, look_up, found, environment={VARIABLE: str(tmp_path)})
    process.join(120)
    process.kill()
    assert found.is_file(), log.read_text()
    assert Plan.from_json(found.read_text()).to_json() == expected.to_json()


def look_up(found: Path) -> None:
    """What a process does that has planned nothing itself, and may not."""
    lightning_plugin.plans.choose_recipe = refuse  # type: ignore[assignment]
    found.write_text(plans()[-1].to_json())


def test_other_budgets_and_heads_have_recipes_of_their_own(kept: Path) -> None:
    """A head is made of vectors, whose sizes tell nothing of the image: what they take is another network's all the
    same."""
    plans(SIZES[:1])
    plans(SIZES[:1], "6MiB")
    assert len(list(kept.glob("*.json"))) == 2
    for count in (10, 20):
        tiled = TiledModule(nn.Sequential(net(), nn.Linear(8, count)), budget=BUDGET)
        tiled(torch.zeros(1, 3, *SIZES[0])).sum().backward()
    assert len(list(kept.glob("*.json"))) == 4


def test_nothing_is_kept_where_there_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    plans(SIZES[:1])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "recipes").write_text("a file, where a folder should be")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    plans(SIZES[:1])
    assert "cannot be written" in caplog.text


def test_only_so_many_files_are_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_FILES", 2)
    for i in range(4):
        cache.keep(f"key-{i}", [])
    assert len(list(kept.iterdir())) == 2


@pytest.mark.parametrize(("holder", "name"), [(tempfile._TemporaryFileWrapper, "write"), (os, "replace")])
def test_what_cannot_be_written_leaves_nothing(
    kept: Path, monkeypatch: pytest.MonkeyPatch, holder: Any, name: str
) -> None:
    """A disk that is full for a week must not be filled further, step by step."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(
            *((os, name) if name == "replace" else (tempfile._TemporaryFileWrapper, name)), full, raising=False
        )
        cache.keep("key", [])
    assert list(kept.iterdir()) == []


def test_what_a_killed_process_has_left_goes_in_time(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_FILES", 2)
    kept.mkdir()
    old, new = kept / "half-old", kept / "half-new"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (0, 0))
    cache.keep("key", [])
    assert not old.exists() and new.exists()


def test_recipes_that_may_only_be_read_are_read(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refused)
    assert len(cache.load(written.stem)) == 1


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_file_is_ignored(written: Path, data: st.DataObject) -> None:
    whole = written.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = data.draw(
        st.sampled_from([whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], b"", b"[]", b"\xff\xfe"])
    )
    written.write_bytes(damaged)
    assert cache.load(written.stem) == []
    written.write_bytes(whole)
    assert len(cache.load(written.stem)) == 1
