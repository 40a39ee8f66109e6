"""Strategies that are pickled, copied, or started in processes of their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_plugin import SFTDDPStrategy, SFTStrategy
from tests.exactness import difference
from tests.lightning_plugin.strategy.modules import Frozen, Pictures
from tests.lightning_plugin.strategy.test_updates import Module, fitted, same, tight
from tests.lightning_plugin.strategy.training import TILES, fit, trainer
from tests.lightning_plugin.test_streamed import Encoder


class Noting(Frozen):
    """Leaves the number of its processes, and that its steps were tiled, in buffers, which come back to the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("processes", torch.zeros(()))
        self.register_buffer("tiles", torch.zeros(()))

    def on_train_end(self) -> None:
        self.processes.fill_(self.trainer.world_size)
        self.tiles.fill_(self.trainer.strategy.report.tiles)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.full)])
def test_processes_are_started_and_train(method: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, spawned = Frozen().double(), Noting().double()
    spawned.net.load_state_dict(plain.net.state_dict())
    fit(plain, DataLoader(Pictures(4), batch_size=2), max_steps=2)
    strategy = SFTDDPStrategy(**TILES, start_method=method, process_group_backend="gloo")
    options = {"devices": 2, "max_steps": 2, "default_root_dir": tmp_path, "use_distributed_sampler": True}
    trainer(strategy, **options).fit(spawned, DataLoader(Pictures(4), batch_size=1))
    assert spawned.processes == 2 and spawned.tiles > 2
    for name, value in plain.net.state_dict().items():
        assert difference(spawned.net.state_dict()[name], value, 1e-3) < 1e-9, name


def test_the_documented_name_starts_processes_by_spawning() -> None:
    launcher = trainer("sft_ddp_spawn", devices=2).strategy.launcher
    assert launcher._start_method == "spawn"


def pickled(strategy: Any) -> Any:
    return pickle.loads(pickle.dumps(strategy))


@pytest.mark.slow
@pytest.mark.parametrize("how", [copy.deepcopy, pytest.param(pickled, marks=pytest.mark.full)])
def test_copies_of_a_strategy_train_each_their_own_module(how: Callable[[Any], Any]) -> None:
    torch.manual_seed(2)
    first = Module(Encoder(2).double(), "SGD", lr=1e-2)
    second, plain = copy.deepcopy(first), copy.deepcopy(first)
    one = tight(first.net, "disk")
    other = how(one)
    fitted(first, one)
    fitted(second, other)
    fitted(plain)
    same(first, plain)
    same(second, plain)
    assert set(one.engine.homes) <= set(first.parameters()) and set(other.engine.homes) <= set(second.parameters())
    assert one.engine.homes and other.engine.homes
    again = how(one)  # after training: what lives where is of the first one's parameters
    assert not again.engine.homes and again.engine.options == one.engine.options


@pytest.mark.parametrize("strategy", [SFTStrategy(**TILES), SFTDDPStrategy(**TILES)])
def test_a_trainer_can_be_pickled(strategy: object) -> None:
    run = pickle.loads(pickle.dumps(trainer(strategy)))
    assert run.strategy.engine.options == strategy.engine.options  # type: ignore[attr-defined]
