"""Checkpoints: a resumed run is the same run, and the files need nothing of this package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader

from lightning_plugin import SFTDDPStrategy, SFTStrategy, WholeCheckpoints
from lightning_plugin.strategy import checkpoints
from tests.lightning_plugin.strategy.modules import Pictures, Slides, loader
from tests.lightning_plugin.strategy.training import TILES, fit, state

ROOT = Path(__file__).resolve().parents[3]


class Resumable(DataLoader):
    """Goes on in the middle of an epoch, as Lightning asks of a loader: the order and the place in it are its state."""

    def __init__(self) -> None:
        super().__init__(Pictures(4), batch_size=1)
        self.order: list[int] = []
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        if not self.order:
            self.order = torch.randperm(len(self.dataset)).tolist()
        while self.place < len(self.order):
            self.place += 1
            yield torch.utils.data.default_collate([self.dataset[self.order[self.place - 1]]])
        self.order, self.place = [], 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "place": self.place}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.order, self.place = saved["order"], saved["place"]


def run(folder: Path, data: Any, resume: Path | None = None, every: int | None = None, **strategy: Any) -> Slides:
    torch.manual_seed(0)
    module = Slides(dropout=0.4)
    keep = ModelCheckpoint(
        folder, "{step}", every_n_train_steps=every, save_top_k=-1, save_on_train_epoch_end=every is None
    )
    options = {"max_epochs": 3, "max_steps": -1, "callbacks": [keep], "enable_checkpointing": True}
    fit(module, data, SFTStrategy(**(strategy or TILES)), seed=5 if resume is None else 99, **options, ckpt_path=resume)
    return module


def same(one: Slides, other: Slides, since: int) -> None:
    """Bit for bit, the losses after the checkpoint too."""
    mine, others = state(one), state(other)
    for name in mine:
        if name.startswith("loss"):
            continue
        assert torch.equal(mine[name], others[name]), name
    assert len(one.losses) - since == len(other.losses) > 0
    assert all(torch.equal(a, b) for a, b in zip(one.losses[since:], other.losses, strict=True))


@pytest.mark.slow
def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    whole = run(tmp_path, Resumable(), every=5)
    resumed = run(tmp_path / "again", Resumable(), resume=tmp_path / "step=5.ckpt", every=5)
    same(whole, resumed, 5)


@pytest.mark.slow
def test_a_run_resumes_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    def data() -> DataLoader:
        return loader(4, 2, shuffle=True)

    whole = run(tmp_path, data())
    resumed = run(tmp_path / "again", data(), resume=tmp_path / "step=2.ckpt")
    same(whole, resumed, 2)


def test_a_resumed_run_keeps_its_plans(tmp_path: Path) -> None:
    whole = run(tmp_path, loader(2, 2), budget="1GiB", tile_over=1)
    kept = torch.load(tmp_path / "step=1.ckpt", weights_only=True)["lightning_plugin"]
    assert kept["options"]["budget"] == 2**30 and len(kept["plans"]) == 1 and kept["threads"] == torch.get_num_threads()
    key, (text,) = next(iter(kept["plans"].items()))
    edited = text.replace('"peak_bytes": ', '"peak_bytes": 1', 1)
    changed = torch.load(tmp_path / "step=1.ckpt", weights_only=False)
    changed["lightning_plugin"]["plans"][key] = [edited]
    changed["lightning_plugin"]["roomy"] = []
    del changed["lightning_plugin"]["options"]["halo"]  # as from a version that had no such option
    torch.save(changed, tmp_path / "changed.ckpt")
    strategy = SFTStrategy(budget="1GiB", tile_over=1)
    fit(Slides(0.4), loader(2, 2), strategy, max_epochs=3, ckpt_path=tmp_path / "changed.ckpt")
    assert strategy.plan is not None and strategy.plan.to_json() == edited, "a new plan was made"
    assert len(whole.losses) == 3


def test_another_budget_makes_new_plans(tmp_path: Path) -> None:
    run(tmp_path, loader(2, 2), budget="1GiB", tile_over=1)
    strategy = SFTStrategy(budget="2GiB", tile_over=1)
    fit(Slides(0.4), loader(2, 2), strategy, max_epochs=3, ckpt_path=tmp_path / "step=1.ckpt")
    assert strategy.plan is not None and strategy.plan.budget == 2**31


def test_checkpoints_load_without_this_package(tmp_path: Path) -> None:
    run(tmp_path, loader(2, 2))
    assert not [kind for kind in torch.serialization.get_safe_globals() if "lightning_plugin" in str(kind)]
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_plugin"]:
            patch.setitem(sys.modules, name, None)  # an import of it fails
        found = torch.load(tmp_path / "step=1.ckpt", weights_only=True)
    assert {"state_dict", "optimizer_states", "loops", "lightning_plugin"} <= set(found)


def test_a_run_goes_on_under_the_default_strategy(tmp_path: Path) -> None:
    run(tmp_path, loader(2, 2))
    module = Slides(dropout=0.4)
    fit(module, loader(2, 2), "auto", max_epochs=3, ckpt_path=tmp_path / "step=1.ckpt")
    assert len(module.losses) == 2


def test_weights_alone(tmp_path: Path) -> None:
    module = Slides()
    trained = fit(module, loader(2, 2), SFTStrategy(**TILES), max_steps=1)
    trained.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    found = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in found and "lightning_plugin" not in found
    again = Slides.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.float().parameters(), strict=True))


def test_fewer_processors_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from lightning_plugin.strategy.checkpoints import restore_threads

    before = torch.get_num_threads()
    restore_threads(10_000)
    assert torch.get_num_threads() == before
    assert "10000 threads" in caplog.text


def test_a_strategy_writes_checkpoints_without_a_second_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the file, beside its name, and given the name when it is there. Who gives another writer gets that."""
    written: list[Any] = []
    save = torch.save

    def noted(thing: Any, file: Any) -> None:
        written.append(file)
        save(thing, file)

    monkeypatch.setattr(torch, "save", noted)
    module = Slides()
    strategy = SFTStrategy(budget="64MiB")
    trainer = fit(module, loader(2, 1), strategy, max_steps=1)
    trainer.save_checkpoint(tmp_path / "deep" / "one.ckpt")
    assert written and all(isinstance(file, checkpoints.Writer) for file in written)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["one.ckpt"]
    before = (tmp_path / "deep" / "one.ckpt").read_bytes()
    (tmp_path / "deep" / "one.ckpt.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        trainer.save_checkpoint(tmp_path / "deep" / "one.ckpt")
    assert (tmp_path / "deep" / "one.ckpt").read_bytes() == before
    own = TorchCheckpointIO()
    assert SFTStrategy(checkpoint_io=own).checkpoint_io is own
    assert SFTDDPStrategy(checkpoint_io=own).checkpoint_io is own
    assert isinstance(SFTDDPStrategy().checkpoint_io, WholeCheckpoints)
    wrapped = SFTStrategy(checkpoint_io=AsyncCheckpointIO()).checkpoint_io
    assert isinstance(wrapped.checkpoint_io, WholeCheckpoints)
    assert pl.Trainer(strategy=SFTStrategy(), plugins=[own], logger=False).strategy.checkpoint_io is own
