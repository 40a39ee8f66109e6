"""The benchmark of other ways: the ways compute what plain PyTorch does, and runs are made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import keep
from benchmarks.peers import runs
from benchmarks.peers.alone import errors
from benchmarks.peers.networks import Headed, build
from benchmarks.peers.ours import tiled
from benchmarks.peers.runs import Refused, Run, budget_of, forget, keep_run, known, left
from benchmarks.peers.steps import Step, cached, checkpointed, on_cpu, plain
from benchmarks.peers.ways import WAYS
from benchmarks.peers.works import Work

IMAGE = Work("vgg16", 64, width=1 / 16, tile=32)
GLASS = Work("resnet18", 128, width=1 / 16, tile=64, glass=0.8)
BAG = Work("resnet18", 48, width=1 / 16, patches=6, rival="caching")


def ours(net: Headed, image: Tensor, work: Work) -> Step:
    return tiled(net, image, work, 4 * 2**20)[0]


PAIRS = [(IMAGE, checkpointed), (IMAGE, on_cpu), (IMAGE, ours), (GLASS, checkpointed), (GLASS, ours), (BAG, cached)]


@pytest.mark.parametrize(("work", "way"), [*PAIRS, (BAG, ours)], ids=lambda v: getattr(v, "__name__", "") or v.name)
def test_ways_compute_the_same_gradients(work: Work, way: Callable[[Headed, Tensor, Work], Step]) -> None:
    gradients = []
    for each in (plain, way):
        net = build(work.network, work.width, bool(work.patches)).double()
        each(net, work.image().double(), work)()
        gradients.append({n: p.grad for n, p in net.named_parameters() if p.grad is not None})
    expected, found = gradients
    assert expected and found.keys() == expected.keys()
    assert errors(found, expected)["worst_error"] < 1e-9


def test_a_wrong_gradient_shows() -> None:
    expected = {"a": torch.ones(4), "b": torch.full((2,), 10.0)}
    assert errors(expected, expected) == {"error": 0.0, "worst_error": 0.0}
    twice = errors({**expected, "a": 2 * expected["a"]}, expected)
    assert twice["worst_error"] == pytest.approx(1.0)
    assert twice["error"] == pytest.approx(2 / (4 + 200) ** 0.5)
    with pytest.raises(SystemExit, match="no gradient of b"):
        errors({"a": expected["a"]}, expected)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (keep, runs):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


def made(peak: int = 2**30) -> dict[str, Any]:
    figures = {"seconds": 2.0, "processor_seconds": 1.0, "step_peak": peak, "peak": peak, "error": 0.0}
    return {**figures, "worst_error": 0.0, "process_seconds": 4.0}


def test_a_run_is_made_once_and_one_that_failed_not_again(results: Path) -> None:
    ways = ["plain", "compile", "lightstream"]
    assert [(r.way, r.repetition) for r in left([IMAGE], ways, 2)] == [(w, i) for i in (0, 1) for w in ways]
    keep_run(Run(IMAGE, "plain", 0), made())
    keep_run(Run(IMAGE, "compile", 0), {"failed": "no compiler", "process_seconds": 1.0})
    assert [(r.way, r.repetition) for r in left([IMAGE], ways, 2)] == [
        ("lightstream", 0), ("plain", 1), ("lightstream", 1),
    ]  # fmt: skip
    forget([IMAGE], ways, only_failed=True)
    assert sorted(known(IMAGE)) == ["plain"]
    assert "compile" in [r.way for r in left([IMAGE], ways, 1)]
    forget([IMAGE], ways, only_failed=False)
    assert not known(IMAGE)


def test_runs_of_another_machine_do_not_count(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_run(Run(IMAGE, "plain", 0), made())
    monkeypatch.setattr(runs, "here", lambda: {"processor": "another"})
    assert not known(IMAGE)
    assert len(list(left([IMAGE], ["plain"], 1))) == 1


def test_ours_promises_no_more_than_the_rival_takes(results: Path) -> None:
    with pytest.raises(Refused, match="has not run"):
        budget_of(WAYS["ours"], IMAGE)
    keep_run(Run(IMAGE, "lightstream", 0), made(2**30))
    budget = budget_of(WAYS["ours"], IMAGE)
    assert budget * 1.15 + 64 * 2**20 == pytest.approx(2**30, abs=2)
    forget([IMAGE], ["lightstream"], only_failed=False)
    keep_run(Run(IMAGE, "lightstream", 0), made(2**20))
    with pytest.raises(Refused, match="takes no more"):
        budget_of(WAYS["ours"], IMAGE)
