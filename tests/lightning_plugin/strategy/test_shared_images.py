"""``split="image"``: several processes on the tiles of one image compute what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning_fabric.utilities.data import _auto_add_worker_init_fn
from torch import nn

from lightning_plugin import LazyImage, SFTDDPStrategy, SFTStrategy
from lightning_plugin.strategy.ddp import fingerprint
from lightning_plugin.strategy.synced import convert_sync_batchnorm
from tests.exactness import difference
from tests.lightning_plugin.strategy.modules import Noisy, Slides, loader
from tests.lightning_plugin.strategy.ranks import BUDGET, launch, succeed
from tests.lightning_plugin.strategy.training import TILES, fit, state


@pytest.mark.slow
def test_training_is_that_of_one_process(tmp_path: Path) -> None:
    """Train-mode BatchNorm, skip connections, attention and max pooling, dropout by position and on vectors."""
    found = succeed("shared", tmp_path)
    torch.manual_seed(0)
    module = Noisy()
    run = fit(module, loader(3, 1, shuffle=True), SFTStrategy(**TILES), seed=0, max_epochs=2, max_steps=-1)
    assert found["steps"] == 6, "every rank has all images"
    expected = state(module)
    for losses in found["losses"]:
        assert difference(losses, torch.stack(module.losses)) < 1e-9
    weights = {k: difference(found["state"][k], expected[k], 1e-3) for k in found["state"] if "accuracy" not in k}
    assert not {k: e for k, e in weights.items() if not e < 1e-9}
    run.validate(module, loader(2, 1), verbose=False)
    assert difference(found["validated"], run.logged_metrics["val_loss"]) < 1e-9
    (first, planned), (second, _) = found["tiles"]
    assert 0 < second <= first <= planned and first - second <= 12, "tiles are shared"


@pytest.mark.slow
def test_the_budget_of_one_process_is_enough_for_each(tmp_path: Path) -> None:
    found = succeed("shared_budget", tmp_path)
    torch.manual_seed(0)
    module = Slides()
    fit(module, loader(6, 1), "auto", max_steps=3, accumulate_grad_batches=2)
    expected = module.state_dict()
    weights = {k: difference(found["state"][k], expected[k], 1e-3) for k in found["state"] if "accuracy" not in k}
    assert not {k: e for k, e in weights.items() if not e < 1e-9}
    assert difference(found["losses"], torch.stack(module.losses)) < 1e-9
    for peak, tiles in found["peaks"]:
        assert tiles > 0 and 0 < peak <= BUDGET


@pytest.mark.slow
def test_any_network_under_any_plan_on_three_ranks(tmp_path: Path) -> None:
    for found in succeed("shared_networks", tmp_path, world=3):
        assert found["networks"] >= 7 and found["wrong"] == []
        for background in found["background"]:
            assert background["error"] < 1e-9
            assert 0 < background["saved"] < background["tiles"], "ranks agree on which tiles are identical"


def test_ranks_with_different_images_are_an_error_and_not_a_hang(tmp_path: Path) -> None:
    for done in launch("strangers", tmp_path):
        assert done.returncode not in (0, None)
        assert "the ranks were given different batches" in done.stdout


def test_batches_are_told_apart_without_being_read() -> None:
    image, label = torch.randn(2, 3, 40, 50), torch.tensor([1, 0])
    first = fingerprint({"image": LazyImage.from_tensor(image), "label": label, "path": "/here/slide.svs"})
    assert fingerprint({"image": LazyImage.from_tensor(image), "label": label, "path": "/there/slide.svs"}) == first
    assert fingerprint({"image": LazyImage.from_tensor(image + 1), "label": label}) != first
    assert fingerprint({"image": LazyImage.from_tensor(image), "label": 1 - label}) != first
    turned = LazyImage.from_tensor(image.movedim(1, -1)).movedim(-1, 1)
    assert fingerprint([turned]) != fingerprint([turned + 0, torch.zeros(1)])


@pytest.mark.parametrize("split", ["image", "batch"])
def test_workers_of_all_ranks_augment_a_shared_image_alike(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``seed_everything(seed, workers=True)``, Lightning gives the workers of each rank other seeds."""
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    drawn = set()
    for rank in range(2):
        found = SFTDDPStrategy(split=split).process_dataloader(loader(num_workers=1))  # type: ignore[arg-type]
        _auto_add_worker_init_fn(found, rank)  # as Lightning does then
        with torch.random.fork_rng():
            torch.manual_seed(5)
            found.worker_init_fn(0)
            drawn.add(float(torch.rand(())))
    assert len(drawn) == (1 if split == "image" else 2)


def test_every_rank_goes_on_with_the_first_ranks_random_numbers() -> None:
    strategy = SFTDDPStrategy(split="image")
    assert strategy._state_of_rank([{"first": 1}, {"second": 2}]) == {"first": 1}


def test_a_batch_norm_alone_sees_the_whole_image() -> None:
    layer = convert_sync_batchnorm(nn.SyncBatchNorm(3), convert_all=False, same_batch=True)
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(layer(x), nn.BatchNorm2d(3)(x)), "on a CPU too, where PyTorch's own refuses"


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="split is"):
        SFTDDPStrategy(split="slide")
