"""Published encoders: their networks, and files of weights that are theirs or another's."""

from __future__ import annotations

import copy
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, TiledModule
from tests.exactness import assert_same_step
from wsi_trainer.cli import main
from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import Config
from wsi_trainer.models import AttentionPooling, PatchEncoder, ResNet, SlideClassifier
from wsi_trainer.models.backbones import answer, import_timm, timm_network
from wsi_trainer.models.encoders import (
    ENCODERS,
    AttentionPooler,
    ClassAndMean,
    ClassToken,
    PlainAttentionPooler,
    Pooled,
    build_encoder,
    encoder_named,
    import_transformers,
    outline,
    shapes_of,
)
from wsi_trainer.models.weights import compare, load_pretrained

pytestmark = pytest.mark.skipif(
    find_spec("timm") is None or find_spec("transformers") is None, reason="timm or transformers is not installed"
)
SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2}

LOOKED_AT = ("uni2-h", "conch", "phikon", "hibou-b", "kaiko-vits8", "ctranspath", "resnet50", "dinov2-small")
"""One of each kind: all of them take a minute."""


def small_vit(**arguments: object) -> nn.Module:
    return timm_network("vit_tiny_patch16_224", **{**SMALL, **arguments})


@pytest.mark.slow
def test_each_encoder_has_the_shapes_of_its_entry_and_makes_vectors_of_its_width() -> None:
    for encoder in map(encoder_named, LOOKED_AT):
        network = outline(encoder)
        assert shapes_of(network) == encoder.shapes, encoder.name
        if sum(p.numel() for p in network.parameters()) < 1e8:
            assert answer(network, 2, encoder.size).shape == (2, encoder.width), encoder.name


def test_a_name_that_is_none_is_told_with_those_near_it() -> None:
    with pytest.raises(UserError, match=r"no encoder 'uni-2h'; near are uni2-h"):
        PatchEncoder("uni-2h")


@pytest.mark.slow
def test_a_file_fits_its_encoder_and_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network = build_encoder(encoder_named("kaiko-vits16"))
    save_file(network.state_dict(), tmp_path / "own.safetensors")
    wrapped = {"epoch": 1, "state_dict": {f"module.{k}": v for k, v in network.state_dict().items()}}
    torch.save(wrapped, tmp_path / "own.pt")
    for name in ("own.safetensors", "own.pt"):
        assert main(["doctor", "--encoder", "kaiko-vits16", "--weights", str(tmp_path / name), "--json"]) == 0
        checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
        assert "150 of the network's 150 tensors loaded" in checks["weights"]["detail"]
    assert main(["doctor", "--encoder", "kaiko-vits8", "--weights", str(tmp_path / "own.pt"), "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "patch_embed.proj.weight (384, 3, 16, 16) for (384, 3, 8, 8)" in checks["weights"]["detail"]
    assert main(["doctor", "--weights", "x"]) == 2
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "own.safetensors").read_bytes()[:1000])
    assert main(["doctor", "--encoder", "kaiko-vits8", "--weights", str(tmp_path / "cut.safetensors")]) == 2
    assert "no file of safetensors, or is cut short" in capsys.readouterr().err


def test_the_list_has_every_encoder_with_its_licence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--encoders"]) == 0
    listed = capsys.readouterr().out
    for encoder in ENCODERS:
        assert encoder.name in listed and encoder.licence in listed and encoder.source in listed


@pytest.mark.parametrize("arguments", [{}, {"reg_tokens": 4, "no_embed_class": True}])
def test_positions_of_another_size_of_patch_are_interpolated_as_timm_does(
    arguments: dict[str, object], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    large, small = small_vit(img_size=48, **arguments), small_vit(**arguments)
    torch.save(large.state_dict(), tmp_path / "weights.pt")
    encoder = PatchEncoder(small, 32)
    match = load_pretrained(encoder, tmp_path / "weights.pt")
    assert match.fits and match.resampled == ("pos_embed",)
    import_timm()
    from timm.models.vision_transformer import checkpoint_filter_fn

    expected = checkpoint_filter_fn(large.state_dict(), small)
    for name, value in small.state_dict().items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.slow
def test_weights_of_a_swin_transformer_as_old_versions_of_timm_named_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = build_encoder(encoder_named("ctranspath"))
    old = {}
    for name, value in network.state_dict().items():
        parts = name.split(".")
        if "downsample" in parts:  # they stood at the end of the stage before
            parts[1] = str(int(parts[1]) - 1)
        old[".".join(parts)] = value
    old["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(49, 49, dtype=torch.long)
    torch.save({"model": old}, tmp_path / "ctranspath.pth")
    _, match = compare(outline(encoder_named("ctranspath")), tmp_path / "ctranspath.pth")
    assert match.fits, match


def test_the_colours_are_those_of_the_encoder_unless_others_are_given() -> None:
    encoder = PatchEncoder("kaiko-vits16")
    assert SlideClassifier(backbone=encoder).mean.flatten().tolist() == [0.5, 0.5, 0.5]
    given = SlideClassifier(backbone=encoder, mean=(0.1, 0.2, 0.3)).mean.flatten()
    torch.testing.assert_close(given, torch.tensor([0.1, 0.2, 0.3]))


def tiny_of_transformers() -> nn.Module:
    transformers = import_transformers()
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    return transformers.Dinov2Model(config)


def test_a_vision_model_of_transformers_by_its_config(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = tiny_of_transformers()
    model.config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    encoder = PatchEncoder(f"transformers:{tmp_path}", 32)
    assert load_pretrained(encoder, tmp_path / "model.safetensors").fits
    patches = torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        expected = model.eval()(patches).last_hidden_state[:, 0]
        torch.testing.assert_close(encoder.eval()(patches)[0, :, :, 0].T, expected)
    with pytest.raises(UserError, match=r"has no config\.json"):
        PatchEncoder(f"transformers:{tmp_path / 'other'}", 32)


def pooled(kind: str) -> nn.Module:
    trunk = small_vit(global_pool="", reg_tokens=2, init_values=0.1)
    if kind == "class and mean":
        return ClassAndMean(trunk, 3)
    return Pooled(trunk, (AttentionPooler if kind == "conch" else PlainAttentionPooler)(16, 24, 2), 16)


@pytest.mark.parametrize("kind", ["class and mean", "conch", "conch 1.5", "transformers", "class and mean of it"])
def test_every_form_of_vector_is_trained_in_tiles_as_whole(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    if kind == "transformers":
        tiny_of_transformers().config.save_pretrained(tmp_path)
        encoder = PatchEncoder(f"transformers:{tmp_path}", 32)
    elif kind == "class and mean of it":
        encoder = PatchEncoder(ClassToken(trunk := tiny_of_transformers(), beside_mean=True), 32)
        tokens = trunk(image := torch.randn(1, 3, 32, 32)).last_hidden_state[0]
        torch.testing.assert_close(encoder(image)[0, :, 0, 0], torch.cat([tokens[0], tokens[1:].mean(0)]))
    else:
        encoder = PatchEncoder(pooled(kind), 32)
    plain = SlideClassifier(backbone=encoder, head=AttentionPooling).double()
    network = copy.deepcopy(plain)
    patches = torch.randint(0, 256, (7, 3, 32, 32), dtype=torch.uint8)
    expected: Tensor = plain.task.loss(plain(patches), torch.tensor([1]))
    actual = network.task.loss(TiledModule(network, tiles=(1, 1, 3))(LazyImage.from_tensor(patches)), torch.tensor([1]))
    assert_same_step(plain, network, expected, actual)


def test_weights_are_downloaded_from_the_hub_once_and_the_run_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, asked = pytest.importorskip("huggingface_hub"), []
    torch.save(ResNet().state_dict(), tmp_path / "pytorch_model.bin")

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    words = {"pretrained": "hf-hub:me/encoder", "backbone": {"class_path": "wsi_trainer.models.ResNet"}}
    config = Config.of({"model": words, "data": {"manifest": "slides.csv"}}, tmp_path / "run")
    assert "pretrained: hf-hub:me/encoder" in config.text
    model = config.build().model
    match = model.load_pretrained()
    assert match is not None and match.fits and asked == ["me/encoder"]
    given = torch.load(tmp_path / "pytorch_model.bin")
    assert all(torch.equal(value, given[name]) for name, value in model.backbone.state_dict().items())
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"me/encoder on the hub has neither model\.safetensors nor pytorch_model\.bin"):
        model.load_pretrained()
