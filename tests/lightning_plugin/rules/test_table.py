"""Each function has one rule; nothing is overwritten by accident, another may be asked behind it, and operators that
PyTorch tags as pointwise need none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_plugin.rules.pointwise import pointwise
from lightning_plugin.rules.table import ATEN, Rule, RuleTable
from tests.lightning_plugin.rules.helpers import After, assert_tiled


def answering(answer: Any) -> Rule:
    def rule(*call: Any) -> Any:
        return answer

    return rule


def test_nothing_is_overwritten_by_accident() -> None:
    table = RuleTable("ours")
    table.rule(abs)(answering(NotImplemented))
    with pytest.raises(ValueError, match=r"has a rule for .* already; pass replace=True"):
        table.rule(abs)(answering(1))
    table.otherwise(abs)(answering("last"))
    assert table.get(abs)() == "last"  # type: ignore[misc]
    table.rule(abs, replace=True)(answering("alone"))
    assert table.get(abs)() == "alone" and len(table.entries) == 1  # type: ignore[misc]
    table.otherwise(abs)(answering("last"))
    assert table.get(abs)() == "alone"  # type: ignore[misc]


def special(x: Tensor) -> Tensor:
    return torch.special.i0e(x) * torch.special.entr(x.sigmoid()) + torch.igamma(x.detach().abs() + 1, x.abs() + 1)


def test_operators_that_pytorch_tags_as_pointwise_are_tiled() -> None:
    for operator in (torch.ops.aten.special_i0e.default, torch.ops.aten.igamma.default):
        assert operator not in ATEN.entries and ATEN.get(operator) is pointwise
    assert_tiled(After(special), (2, 3, 7, 9), tiles=(3, 2), backward_tiles=(2, 4))


def test_channels_are_sorted_in_tiles() -> None:
    assert_tiled(After(lambda x: x.sort(1, descending=True).values.cumsum(1)), (2, 3, 7, 9), tiles=(3, 2))
