"""U-Net and FPN over every encoder: which maps they join, where these lie, and what is refused."""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from lightning_plugin import LazyImage, TiledModule, materialize
from tests.lightning_plugin.stubs import timm_alone
from wsi_trainer.errors import UserError
from wsi_trainer.fit.one_run import instantiate, parse
from wsi_trainer.fit.parser import make_parser
from wsi_trainer.fit.reach import limited
from wsi_trainer.models import (
    FPN,
    VGG,
    ConvNeXt,
    DarkNet,
    EfficientNet,
    PatchEncoder,
    ResNet,
    SegmentationTask,
    SlideClassifier,
    UNet,
    UNetEncoder,
)

ENCODERS = {
    "VGG": (lambda: VGG((4, 6), convs=1), [1, 2, 4]),
    "ResNet": (lambda: ResNet((4, 6)), [2, 4]),
    "ResNet without a strided stem": (lambda: ResNet((4, 6), blocks=2, stem_stride=1), [1, 2]),
    "ConvNeXt": (lambda: ConvNeXt((4, 6), (1, 1)), [4, 8]),
    "DarkNet": (lambda: DarkNet((4, 6), (1, 1)), [1, 2, 4]),
    "EfficientNet": (lambda: EfficientNet((4, 6), (1, 2)), [2, 4]),
    "UNetEncoder": (lambda: UNetEncoder((4, 6, 8)), [1, 2, 4]),
}


@pytest.mark.parametrize("decoder", [UNet, FPN])
@pytest.mark.parametrize("name", ENCODERS)
def test_joins_the_last_map_of_each_size(decoder: type[UNet] | type[FPN], name: str) -> None:
    """What a decoder is given are the outputs of the encoder's own layers, the last before a size ends."""
    make, strides = ENCODERS[name]
    network = decoder(encoder=make()).eval()
    assert network.strides == strides and network.stride == strides[0]
    seen: list[tuple[int, ...]] = []
    expected = []
    x = image = torch.rand(1, 3, 8 * strides[-1], 4 * strides[-1])
    for layer in network.encoder.layers:
        below = layer(x)
        if below.shape[2:] != x.shape[2:] and x is not image:
            expected.append(x)
        x = below
    expected.append(x)
    plain = network.decode
    network.decode = lambda maps: (seen.extend(maps), plain(maps))[1]  # type: ignore[method-assign, func-returns-value]
    network(image)
    assert len(seen) == len(expected) == len(strides)
    for mine, its in zip(seen, expected, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("decoder", [UNet, FPN])
def test_every_parameter_learns(decoder: type[UNet] | type[FPN]) -> None:
    torch.manual_seed(0)
    network = decoder(encoder=VGG((4, 6), convs=1))
    network(torch.rand(1, 3, 24, 40)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in network.parameters())


@pytest.mark.parametrize("decoder", [UNet, FPN])
def test_a_detail_stays_where_it_is(decoder: type[UNet] | type[FPN]) -> None:
    """A dark square changes the map about itself, and most in its middle, also where no stride divides the sides."""
    torch.manual_seed(0)
    network = decoder(encoder=VGG((6, 8), convs=1)).eval()
    image = torch.ones(1, 3, 61, 83)
    dark = image.clone()
    dark[:, :, 28:36, 60:68] = 0
    with torch.no_grad():
        change = (network(dark) - network(image)).square().sum(1)[0]
    rows, columns = torch.meshgrid(torch.arange(61.0), torch.arange(83.0), indexing="ij")
    y, x = (change * rows).sum() / change.sum(), (change * columns).sum() / change.sum()
    assert abs(y - 31.5) < 2 and abs(x - 63.5) < 2


@pytest.mark.parametrize("decoder", [UNet, FPN])
def test_tile_by_tile_is_plain_pytorch(decoder: type[UNet] | type[FPN]) -> None:
    """With encoders that have a stride, on a slide whose sides it does not divide."""
    torch.manual_seed(0)
    task = SegmentationTask(["a", "b"])
    plain = SlideClassifier(decoder(encoder=ResNet((4, 6, 8), norm="weight")), task=task).double()
    network = copy.deepcopy(plain)
    image = torch.randint(0, 256, (1, 3, 91, 75), dtype=torch.uint8)
    target = torch.randint(0, 2, (1, 1, 91, 75), dtype=torch.uint8)
    expected = task.loss(plain(image), target)
    expected.backward()
    tiled = TiledModule(network, tiles=(3, 2))
    actual = materialize(task.loss(tiled(LazyImage.from_tensor(image)), LazyImage.from_tensor(target)))
    actual.backward()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    for mine, its in zip(plain.parameters(), network.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        torch.testing.assert_close(its.grad, mine.grad, rtol=0, atol=1e-9)


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_encoders_of_timm() -> None:
    with timm_alone():
        network = UNet(encoder="timm:resnet10t").eval()
        assert network.strides == [2, 4, 8, 16, 32] and network(torch.rand(1, 3, 61, 83)).shape == (1, 64, 31, 42)
        pooled = FPN(8, encoder="timm:convnext_atto").eval()
        assert pooled.stride == 4 and pooled(torch.rand(1, 3, 61, 83)).shape == (1, 8, 16, 21)


def test_from_a_config() -> None:
    parser = make_parser("fit", "")
    words = [
        "--out=run", "--data.manifest=manifest.csv", "--model.backbone=wsi_trainer.models.FPN",
        "--model.backbone.width=8", "--model.backbone.encoder=wsi_trainer.models.ResNet",
        "--model.backbone.encoder.init_args.widths=[4,8]", "--model.task=wsi_trainer.models.SegmentationTask",
        "--model.task.classes=[a,b]",
    ]  # fmt: skip
    model, _, _ = instantiate(parser, parse(parser, words))
    assert isinstance(model.backbone, FPN) and model.stride == 2 and model.backbone.widths == [4, 8]
    logits = model(torch.zeros(1, 3, 61, 50, dtype=torch.uint8))
    assert logits.shape == (1, 2, 61, 50)


def test_an_encoder_of_a_config_is_a_class_of_this_package() -> None:
    parser = make_parser("fit", "")
    words = ["--out=run", "--data.manifest=m.csv", "--model.backbone=UNet", "--model.backbone.encoder=os.getcwd"]
    with limited(trusted=False):
        options = parse(parser, words)
        with pytest.raises(UserError, match=r"os\.getcwd is not a class of wsi_trainer.models"):
            instantiate(parser, options)


class Flat(nn.Module):
    """A network that gives nothing but its map."""

    out_channels, stride = 3, 1


def test_encoders_that_are_none() -> None:
    with pytest.raises(UserError, match="the encoder Flat of UNet does not give its inner maps"):
        UNet(encoder=Flat())
    with pytest.raises(UserError, match="the encoder PatchEncoder of FPN does not give"):
        FPN(encoder=PatchEncoder(VGG((4,)), 32))
    with pytest.raises(UserError, match="all maps of the encoder ResNet have the stride 2"):
        UNet(encoder=ResNet((4,)))
    with pytest.raises(ValueError, match="widths are those of its own encoder"):
        UNet((4, 8), encoder=VGG((4, 8)))
    with pytest.raises(ValueError, match="width is 0"):
        FPN(0)
