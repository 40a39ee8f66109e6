"""Rates of this machine: measured when asked, kept, used where they are its own, and never behind the user's back."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_plugin
from lightning_plugin import BudgetError, Plan, Rates, TiledModule, calibrate, calibrated, make_plan
from lightning_plugin.options import Options
from lightning_plugin.planner import calibrate as module
from lightning_plugin.planner.cache import VARIABLE
from lightning_plugin.planner.calibrate import file_of, local, local_rates
from lightning_plugin.planner.costs.rates import RATES
from lightning_plugin.plans import Planner

#: A device on which moving is dear and computing is free: plans for it differ.
SLOW_MEMORY = Rates(flops=1e15, memory=1e6, host=1e6, disk=1e3, call=1e-9)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def known(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Rates:
    """This machine, calibrated to `SLOW_MEMORY`."""
    monkeypatch.setattr(module, "measure", lambda device: SLOW_MEMORY)
    return calibrate("cpu")


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(True), nn.Conv2d(16, 8, 3), nn.AdaptiveAvgPool2d(1))


@pytest.mark.slow
def test_what_is_measured_is_kept_and_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRANSFER", 2**20)
    monkeypatch.setitem(module.SIDES, "cpu", 32)
    assert calibrated("cpu") is None
    rates = calibrate("cpu")
    assert all(rate > 0 for name, rate in asdict(rates).items() if name != "workspace")
    assert calibrated("cpu") == rates == local_rates("cpu")
    assert [p.suffix for p in cache.iterdir()] == [".json"]


def test_another_number_of_threads_is_another_machine(known: Rates, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert calibrated("cpu") is None


def test_only_the_own_device_is_as_measured(known: Rates) -> None:
    assert local_rates("cpu") == local_rates("cpu:0") == known
    assert local_rates("cuda:a100") == RATES["cuda:a100"]
    if not torch.cuda.is_available():
        assert local_rates("cuda") == RATES["cuda"]


def test_plans_without_a_device_do_not_depend_on_the_machine(known: Rates) -> None:
    shape, budget = (1, 3, 256, 256), "8MiB"
    table = make_plan(network(), shape, budget=budget)
    measured = make_plan(network(), shape, budget=budget, device="cpu")
    assert measured.seconds > 100 * table.seconds
    tiled = TiledModule(network(), budget=budget)
    tiled(torch.randn(shape))
    assert tiled.plan is not None and tiled.plan.seconds == pytest.approx(measured.seconds, rel=0.2)


def test_a_run_keeps_the_rates_it_began_with(known: Rates, monkeypatch: pytest.MonkeyPatch) -> None:
    began = Planner(Options(budget=2**30))
    began.rates = known
    resumed = Planner(Options(budget=2**30))
    resumed.load_state_dict(json.loads(json.dumps(began.state_dict())))
    assert resumed.rates == known
    monkeypatch.setattr(module, "measure", lambda device: replace(SLOW_MEMORY, memory=2.0))
    assert calibrate("cpu") != known and resumed.rates == known


@pytest.mark.parametrize("text", ["", "{}", '{"flops": 1}', "[1]"])
def test_a_broken_file_is_told_and_ignored(known: Rates, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = file_of(local("cpu"))
    assert path is not None
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert local_rates("cpu") == RATES["cpu"]
    assert str(path) in caplog.text and "lightning_plugin.calibrate()" in caplog.text
    assert calibrate("cpu") == calibrated("cpu")


def test_a_plan_leaves_room_for_the_workspaces_of_the_device() -> None:
    def plan(budget: int, device: str) -> Plan:
        return make_plan(network(), (1, 3, 4096, 4096), budget=budget, device=device, host_budget=0, disk=False)

    reserve = RATES["cuda:a100"].workspace
    assert reserve > 0
    for budget, expected in ((2**30, reserve), (2**28, 2**25)):  # of a small budget, an eighth
        found = plan(budget, "cuda:a100")
        assert found.forecast.reserve_bytes == expected and found.peak_bytes <= budget
        assert "of the peak are left to the workspaces" in str(found)
    assert plan(2**30, "cpu").forecast.reserve_bytes == 0 and "workspaces" not in str(plan(2**30, "cpu"))
    smallest = {}
    for device in ("cuda:a100", "cpu"):
        with pytest.raises(BudgetError) as refused:
            plan(1000, device)
        smallest[device] = refused.value.smallest
    assert 1.12 <= smallest["cuda:a100"] / smallest["cpu"] <= 1.15
    least = plan(smallest["cuda:a100"], "cuda:a100")
    assert least.forecast.reserve_bytes > 0 and least.peak_bytes <= smallest["cuda:a100"]
    with pytest.raises(BudgetError):
        plan(int(0.97 * smallest["cuda:a100"]), "cuda:a100")


@pytest.mark.gpu
def test_the_workspaces_of_a_gpu_are_measured() -> None:
    assert 0 < module.workspace(torch.device("cuda")) < 4 << 30


def test_a_device_that_is_not_there_cannot_be_measured() -> None:
    absent = "mps" if not torch.backends.mps.is_available() else "cuda"
    with pytest.raises(ValueError, match=f"no device '{absent}' to measure; it has cpu"):
        lightning_plugin.calibrate(absent)
