"""Several processes: what they compute together is what one process computes on all their images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_plugin import SFTDDPStrategy
from lightning_plugin.strategy.synced import Synced, convert_sync_batchnorm, revert_sync_batchnorm
from tests.exactness import difference
from tests.lightning_plugin.strategy.joint import images, joint, network
from tests.lightning_plugin.strategy.modules import Frozen, FrozenByHand, Slides, loader
from tests.lightning_plugin.strategy.ranks import launch, succeed
from tests.lightning_plugin.strategy.streamed import StreamedModule, bags
from tests.lightning_plugin.strategy.training import fit, trainer


def alone(make: Any, **options: Any) -> Any:
    """One process, plain PyTorch, the images of both ranks in one batch."""
    torch.manual_seed(0)
    module = make()
    fit(module, loader(6, 2), "auto", **({"max_steps": 3} | options))
    return module


def assert_together(found: dict[str, Any], module: Any, ignore: tuple[str, ...] = ()) -> None:
    expected = {k: v for k, v in module.state_dict().items() if not k.startswith(ignore)}
    wrong = {k: difference(found["state"][k], v, 1e-3) for k, v in expected.items()}
    assert not {k: e for k, e in wrong.items() if not e < 1e-9}, wrong
    assert difference(found["losses"], torch.stack(module.losses)) < 1e-9


@pytest.mark.slow
def test_synchronised_statistics(tmp_path: Path) -> None:
    found = succeed("synchronized", tmp_path)
    assert_together(found, alone(Slides), ("accuracy",))
    assert "BatchNorm2d" in found["kinds"], "the user's layers are given back"


@pytest.mark.slow
def test_pytorchs_own_synchronised_layers_and_unused_parameters(tmp_path: Path) -> None:
    assert_together(succeed("pytorchs_own", tmp_path), alone(Slides), ("accuracy",))


@pytest.mark.slow
def test_frozen_statistics_and_accumulation(tmp_path: Path) -> None:
    found = succeed("frozen", tmp_path)
    torch.manual_seed(0)
    module = Frozen()
    fit(module, loader(6, 2), "auto", max_steps=3, accumulate_grad_batches=2)
    assert_together(found, module, ("accuracy",))


@pytest.mark.slow
def test_manual_optimization(tmp_path: Path) -> None:
    found = succeed("by_hand", tmp_path)
    assert_together(found, alone(FrozenByHand, max_steps=-1, max_epochs=1), ("accuracy",))


def test_images_of_different_sizes(tmp_path: Path) -> None:
    found = succeed("uneven", tmp_path)
    net = network()
    outputs = joint(net, images())
    sum(o.square().sum() for o in outputs).backward()  # type: ignore[union-attr]
    assert difference(torch.cat(found["outputs"]), torch.cat([o.detach() for o in outputs])) < 1e-9
    largest = max(p.grad.abs().max().item() for p in net.parameters())
    for p, grad in zip(net.parameters(), found["grads"], strict=True):
        assert difference(grad, p.grad, 1e-3 * largest) < 1e-9
    for mine, expected in zip(found["buffers"], net.buffers(), strict=True):
        assert difference(mine, expected) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("split", ["batch", "image"])
def test_parameters_below_the_devices(split: str, world: int, tmp_path: Path) -> None:
    """AdamW on parameters in files: weights of all ranks are those of one process in plain PyTorch."""
    found = succeed("streamed" if split == "batch" else "streamed_shared", tmp_path, world)
    torch.manual_seed(0)
    module = StreamedModule()
    together = 2 * world if split == "batch" else 1
    fit(module, bags(range(8)), "auto", max_steps=-1, max_epochs=1, accumulate_grad_batches=together)
    expected = {name: p.detach() for name, p in module.named_parameters()}
    largest = max(p.abs().max().item() for p in expected.values())
    for state, rank in zip(found["states"], found["ranks"], strict=True):
        assert all(torch.equal(state[name], found["states"][0][name]) for name in expected), "ranks drift apart"
        wrong = {name: difference(state[name], p, 1e-3 * largest) for name, p in expected.items()}
        assert not {name: e for name, e in wrong.items() if not e < 1e-9}
        assert len(rank["streamed"]) > 5 and rank["states"]
        assert rank["peak"] <= rank["budget"]
    assert (found["states"][0]["seen"] == module.seen) == (split == "image"), "the first rank's buffer, as DDP has it"


def test_options_of_a_wrapper_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="find_unused_parameters, bucket_cap_mb: options of DistributedDataParallel"):
        SFTDDPStrategy(parameters="host", bucket_cap_mb=3, find_unused_parameters=True)


@pytest.mark.slow
def test_each_rank_resumes_with_its_own_random_numbers(tmp_path: Path) -> None:
    whole, again = succeed("resumed", tmp_path)
    assert all(torch.equal(whole[k], again[k]) for k in whole)


def test_a_rank_that_dies_ends_the_run(tmp_path: Path) -> None:
    first, second = launch("dying", tmp_path)
    assert second.returncode == 7
    assert first.returncode not in (0, None) and "rank" in first.stdout.lower()


def test_unequal_numbers_of_images_are_an_error_and_not_a_hang(tmp_path: Path) -> None:
    for done in launch("unequal", tmp_path):
        assert done.returncode not in (0, None)
        assert "different numbers of batches in an epoch: 2, 4" in done.stdout


def test_names() -> None:
    run = trainer("sft_ddp", devices=2)
    assert isinstance(run.strategy, SFTDDPStrategy)


class OwnForward(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_layers_are_changed_in_place_and_given_back() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3), nn.InstanceNorm2d(3), OwnForward(3))
    before, state = [type(m) for m in net], net.state_dict()
    convert_sync_batchnorm(net, convert_all=True)
    assert [isinstance(m, Synced) for m in net] == [True, True, False, False]
    assert net.state_dict().keys() == state.keys()
    revert_sync_batchnorm(net)
    assert [type(m) for m in net] == before
    convert_sync_batchnorm(net, convert_all=False)
    assert [isinstance(m, Synced) for m in net] == [False, True, False, False]


@pytest.mark.parametrize("training", [True, False])
def test_a_changed_layer_alone_is_an_ordinary_one(training: bool) -> None:
    plain, changed = nn.BatchNorm2d(3).train(training), convert_sync_batchnorm(nn.BatchNorm2d(3), True).train(training)
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(plain(x), changed(x))
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), changed.buffers(), strict=True))


def test_tiles_that_ranks_share_cannot_hand_rows_on() -> None:
    with pytest.raises(ValueError, match='use halo="recompute"'):
        SFTDDPStrategy(split="image", halo="share")


def test_fsdp_shards_a_tiled_module_as_one_group(tmp_path: Path) -> None:
    found = succeed("sharded", tmp_path)
    for name in ("around", "map around", "within"):
        assert found[name] < 1e-9, name
    assert re.search(r"FSDP shards the module of a TiledModule.*fully_shard\(TiledModule", found["map within"])
    for name, path in {"block": 1, "block, and the whole": 1, "head, and the whole": 2, "block, and around": 1}.items():
        assert re.search(rf"FSDP shards the layer '{path}' of a TiledModule.*fully_shard\(Tiled", found[name])
