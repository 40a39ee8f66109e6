"""Structural keys: exact ones in a process, plans' ones as text that every process makes alike."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_plugin.planner.analysis.recorded import recorded
from lightning_plugin.program.key import Unkeyed, recording_key, structural_key
from tests.lightning_plugin.program.test_findings import Net
from tests.warm import start


def text(side: int, sized: bool) -> str:
    """A plan's key of a network with dropout, a norm, pooling and a maximum of channels."""
    with torch.device("meta"):
        net = nn.Sequential(Net(), Channels())
    with recorded(net, (1, 3, side, side), torch.float32) as (network, _):
        return repr(recording_key(network.recording, sized=sized))


class Channels(nn.Module):
    """The largest channel of each position: an operator that has a function made on the way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.max(1).values


def write(path: Path) -> None:
    path.write_text(text(24, True))


def test_another_process_makes_the_same_text(tmp_path: Path) -> None:
    log, found = tmp_path / "log", tmp_path / "found"
    start(log, write, found).join(120)
    assert found.is_file(), log.read_text()
    assert found.read_text() == text(24, True) and "0x" not in text(24, True)


@pytest.mark.parametrize("thing", [torch.Tensor.mul, torch.nn.functional.relu, torch.add, len, nn.ReLU])
def test_what_lasts_has_a_text_without_an_address(thing: Any) -> None:
    assert "0x" not in repr(structural_key(thing)) and repr(structural_key(thing)) == repr(
        structural_key(thing, frozenset())
    )


def test_sizes_count_only_where_they_are_asked_for() -> None:
    assert text(80, False) == text(96, False) and text(80, True) != text(96, True)


@pytest.mark.parametrize("thing", [1, 1.0, True, 0.0, -0.0, (1,), [1], {"a": 1}, slice(1), torch.float32, nn.ReLU, len])
def test_exact_keys_are_equal_for_nothing_else(thing: Any) -> None:
    others = [1, 1.0, True, 0.0, -0.0, (1,), [1], {"a": 1}, slice(1), torch.float32, nn.ReLU, len]
    keys: list[Hashable] = [structural_key(other) for other in others]
    assert keys.count(structural_key(thing)) == 1


def test_tensors_and_functions_made_on_the_way_have_no_exact_key() -> None:
    for thing in (torch.ones(2), lambda: None, [object()]):
        with pytest.raises(Unkeyed):
            structural_key(thing)
        assert structural_key(thing, frozenset()) == structural_key(thing, frozenset())


@pytest.mark.parametrize("thing", [torch.Tensor.__setitem__, [1].append, lambda: None, Channels(), object()])
def test_a_plans_key_has_a_text_without_an_address(thing: Any) -> None:
    assert "0x" not in repr(structural_key(thing, frozenset()))
