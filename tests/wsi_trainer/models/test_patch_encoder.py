"""Any network that makes a vector or a map of an image encodes the patches of a bag."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule
from tests.exactness import assert_same_step
from wsi_trainer.errors import UserError
from wsi_trainer.models import (
    VGG,
    AttentionPooling,
    AveragePooling,
    ClassAttentionPooling,
    GeneralisedMeanPooling,
    MaxPooling,
    PatchEncoder,
    Pooling,
    ResNet,
    SlideClassifier,
    TopKPooling,
    UNet,
)
from wsi_trainer.models.finetune import parameter_groups
from wsi_trainer.models.weights import load_pretrained

HEADS = (AttentionPooling, AveragePooling, MaxPooling, TopKPooling, GeneralisedMeanPooling, ClassAttentionPooling)
VIT = {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 2}


def check(encoder: PatchEncoder, head: type[Pooling], count: int) -> None:
    """A bag in tiles of a third of its patches gives what plain PyTorch gives."""
    plain = SlideClassifier(backbone=encoder, head=head).double()
    network = copy.deepcopy(plain)
    patches = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
    target = torch.tensor([1])
    expected = plain.task.loss(plain(patches), target)
    tiled = TiledModule(network, tiles=(1, 1, 3) if count > 1 else (1, 1))
    actual = network.task.loss(tiled(LazyImage.from_tensor(patches)), target)
    assert_same_step(plain, network, expected, actual)


@pytest.mark.parametrize("head", HEADS)
def test_every_head_pools_a_bag(head: type[Pooling]) -> None:
    torch.manual_seed(0)
    check(PatchEncoder(ResNet((4, 8)), 32), head, 7)


@pytest.mark.parametrize("count", [1, 8])
def test_a_vit_of_timm(count: int) -> None:
    torch.manual_seed(0)
    encoder = PatchEncoder("timm:vit_tiny_patch16_224", 32, VIT)
    assert encoder.out_channels == 24
    check(encoder, AttentionPooling, count)


def test_a_patch_that_a_network_does_not_take_is_told_when_it_is_built() -> None:
    with pytest.raises(UserError, match=r"does not take patches of 48 × 48 \(.*\); set model\.backbone\.size"):
        PatchEncoder("timm:vit_tiny_patch16_224", 48, VIT)


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2)


def test_a_network_of_tokens_and_arguments_for_another_one_are_refused() -> None:
    with pytest.raises(UserError, match=r"returns a tensor of shape \(2, 3, 1024\) .* must return a vector"):
        PatchEncoder(Tokens(), 32)
    with pytest.raises(ValueError, match="are those of a network of timm"):
        PatchEncoder(ResNet((4,)), 32, {"img_size": 3})


# -- weights from a file, and which parameters then learn how fast


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("prefix", ["", "module.", "backbone."])
def test_all_of_a_file_is_found_whatever_it_is_wrapped_in(tmp_path: Path, prefix: str, wrapped: bool) -> None:
    torch.manual_seed(0)
    source, target = ResNet((4, 8)), ResNet((4, 8))
    state = {prefix + name: value for name, value in source.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3} if wrapped else state, tmp_path / "weights.pt")
    match = load_pretrained(target, tmp_path / "weights.pt")
    assert set(match.loaded) == set(target.state_dict()) and not (match.missing or match.unexpected or match.mismatched)
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in target.state_dict().items())


def test_weights_of_an_encoder_alone_go_into_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = UNet((4, 8)).encoder
    torch.save({"encoder." + name: value for name, value in source.state_dict().items()}, tmp_path / "weights.pt")
    whole = UNet((4, 8))
    match = load_pretrained(whole, tmp_path / "weights.pt")
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in whole.encoder.state_dict().items())
    assert all(name.startswith("decoder.") for name in match.missing) and not match.unexpected


def test_what_does_not_match_is_listed_and_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = VGG((4, 8), convs=1).state_dict()
    first, second = (name for name in state if name.endswith("weight"))
    given = {first: state[first] + 1, second: torch.zeros(3), "head.weight": torch.zeros(2)}
    torch.save(given, tmp_path / "weights.pt")
    network = VGG((4, 8), convs=1)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    match = load_pretrained(network, tmp_path / "weights.pt")
    assert match.loaded == (first,) and match.unexpected == ("head.weight",)
    assert match.mismatched == (f"{second} (3,) for {tuple(state[second].shape)}",)
    assert set(match.missing) == set(state) - {first, second}
    after = network.state_dict()
    assert torch.equal(after[first], given[first])
    assert all(torch.equal(value, after[name]) for name, value in before.items() if name != first)
    assert "1 of the network's" in str(match) and "1 unexpected: head.weight" in str(match)


def test_files_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        load_pretrained(VGG(), tmp_path / "absent.pt")
    (tmp_path / "text.pt").write_text("not weights")
    with pytest.raises(UserError, match="is no file of weights"):
        load_pretrained(VGG(), tmp_path / "text.pt")
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(UserError, match="none of its 1 tensors fits the network VGG; the file begins with a"):
        load_pretrained(VGG(), tmp_path / "other.pt")
    torch.save({"epoch": 1}, tmp_path / "empty.pt")
    with pytest.raises(UserError, match="holds no named tensors"):
        load_pretrained(VGG(), tmp_path / "empty.pt")


def test_frozen_stages_neither_learn_nor_count() -> None:
    model = SlideClassifier(backbone=ResNet((4, 8, 8)), frozen_stages=2).train()
    frozen = model.backbone.stages()[:2]
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randint(0, 256, (1, 3, 48, 48), dtype=torch.uint8)).square().sum().backward()
        optimizer.step()
    kept = {id(t) for stage in frozen for t in (*stage.parameters(), *stage.buffers())}
    for name, tensor in (*model.backbone.named_parameters(), *model.backbone.named_buffers()):
        same = torch.equal(tensor, before[name])
        assert same or id(tensor) not in kept, name
    assert not torch.equal(model.backbone.layers[-1].first[1].running_mean, before["layers.3.first.1.running_mean"])
    with pytest.raises(ValueError, match="frozen_stages is 9; the backbone ResNet has 3 stages"):
        SlideClassifier(backbone=ResNet((4, 8, 8)), frozen_stages=9)


def test_each_stage_learns_slower_than_the_one_behind_it() -> None:
    model = SlideClassifier(backbone=VGG((4, 8, 8)), layer_decay=0.5, frozen_stages=1)
    groups = parameter_groups(model, model.backbones, 0.8, 0.1, 0.5)
    rate = {id(p): group["lr"] for group in groups for p in group["params"]}
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    first, second, third = model.backbone.stages()
    assert not any(id(p) in rate for p in first.parameters())
    assert {rate[id(p)] for p in second.parameters()} == {0.2}
    assert {rate[id(p)] for p in third.parameters()} == {0.4}
    assert {rate[id(p)] for p in model.classifier.parameters()} == {0.8}
    assert all(decay[id(p)] == (0.1 if p.ndim >= 2 else 0) for p in model.parameters() if p.requires_grad)
    assert len(rate) == sum(p.requires_grad for p in model.parameters())


def test_weights_are_loaded_into_every_magnification(tmp_path: Path) -> None:
    source = VGG((4, 8))
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    model = SlideClassifier(backbone=VGG((4, 8)), magnifications=2, pretrained=tmp_path / "weights.pt")
    match = model.load_pretrained()
    assert match is not None and len(match.loaded) == len(source.state_dict())
    for backbone in model.backbones:
        assert all(torch.equal(value, source.state_dict()[name]) for name, value in backbone.state_dict().items())
