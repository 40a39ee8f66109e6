"""The engine's options mean the same wherever they are said."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from torch import nn

from lightning_plugin import SFTDDPStrategy, SFTStrategy, TiledModule, make_plan
from lightning_plugin.options import ModuleOptions, Options, RankOptions, StrategyOptions
from lightning_plugin.strategy.ddp import DDPOptions

NET = nn.Conv2d(3, 2, 3)


def test_texts_and_single_numbers_are_read() -> None:
    found = Options.parse({"budget": "2MiB", "host_budget": 3, "backward_tiles": 2})
    assert (found.budget, found.host_budget, found.backward_tiles) == (2 * 2**20, 3, (2,))
    assert Options.parse({}) == Options()


def test_the_declared_options_are_the_fields_of_options() -> None:
    assert [*ModuleOptions.__annotations__, "plan"] == list(Options.__dataclass_fields__)


def test_each_word_says_what_it_means() -> None:
    """Where it is said, and once: command lines take it from there."""
    for kind in (RankOptions, StrategyOptions, ModuleOptions, DDPOptions):
        documented = re.findall(r"(?m)^ +(\w+): ", kind.__doc__ or "")
        assert sorted(documented) == sorted(kind.__annotations__), kind


@pytest.mark.parametrize("strategy", [SFTStrategy, SFTDDPStrategy])
def test_strategies_take_what_modules_take(strategy: type) -> None:
    """All but the number of calls: a strategy plans a step's calls together. On several devices parameters stay where
    DDP's wrapper needs them, if nothing else is said."""
    several = strategy is SFTDDPStrategy
    taken = get_type_hints(inspect.unwrap(strategy.__init__))["options"].__args__[0].__annotations__  # type: ignore[misc]
    assert ModuleOptions.__annotations__.keys() - taken.keys() == {"calls"}
    with pytest.raises(TypeError, match="'calls' is no option"):
        strategy(calls=1)
    words: Any = {"budget": "2GiB", "disk": False, "halo": "recompute", "half": True}
    made: Any = strategy(**words)
    words["parameters"] = "device" if several else "auto"
    assert made.engine.options == TiledModule(NET, **words).engine.options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"buget": "2GiB"}, "'buget' is no option; the options are budget, tiles"),
        ({"budget": "2GiB", "tiles": 2}, "not both"),
        ({"budget": "two"}, "'two' is not a size"),
        ({"calls": 0}, "calls=0"),
        ({"disk": "/no/such/folder"}, "is not a folder that can be written to"),
    ],
)
def test_what_is_wrong_is_named(words: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        TiledModule(NET, **words)


def test_a_plan_is_made_for_a_budget() -> None:
    with pytest.raises(ValueError, match="budget="):
        make_plan(NET, (1, 3, 20, 20))


def test_the_folder_is_that_of_the_disk(tmp_path: Path) -> None:
    assert Options(disk=str(tmp_path)).folder == str(tmp_path)
    assert Options(disk=True).folder is None
