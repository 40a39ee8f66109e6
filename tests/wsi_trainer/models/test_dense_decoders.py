"""Networks for a class of each pixel: the own U-Net, and decoders of segmentation-models-pytorch."""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from lightning_plugin import LazyImage, TiledModule, materialize
from wsi_trainer.errors import UserError
from wsi_trainer.models import SegmentationBackbone, SegmentationTask, SlideSegmenter, UNet
from wsi_trainer.models.backbones import make_backbone

needs_smp = pytest.mark.skipif(find_spec("segmentation_models_pytorch") is None, reason="it is not installed")
NETWORKS = [
    pytest.param(lambda: UNet((4, 6, 8)), id="own"),
    pytest.param(lambda: SegmentationBackbone("unet", "tu-resnet10t"), id="unet", marks=needs_smp),
    pytest.param(lambda: SegmentationBackbone("fpn", "tu-convnext_atto"), id="fpn", marks=needs_smp),
]


@pytest.mark.parametrize("make", NETWORKS)
def test_every_parameter_is_used(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    network = make().eval()
    network(torch.rand(2, 3, 64, 96)).square().sum().backward()
    assert not [name for name, p in network.named_parameters() if p.grad is None]


def test_a_detail_stays_where_it_is() -> None:
    """A dark square changes the map about itself, and most in its middle, also where no stride divides the sides."""
    torch.manual_seed(0)
    network = UNet((6, 8)).eval()
    image = torch.ones(1, 3, 61, 83)
    dark = image.clone()
    dark[:, :, 28:36, 60:68] = 0
    with torch.no_grad():
        change = (network(dark) - network(image)).square().sum(1)[0]
    rows, columns = torch.meshgrid(torch.arange(61.0), torch.arange(83.0), indexing="ij")
    y, x = (change * rows).sum() / change.sum(), (change * columns).sum() / change.sum()
    assert abs(y - 31.5) < 2 and abs(x - 63.5) < 2


@pytest.mark.parametrize("make", NETWORKS)
def test_tile_by_tile_is_plain_pytorch(make: type[nn.Module]) -> None:
    """On a slide whose sides the strides do not divide."""
    torch.manual_seed(0)
    task = SegmentationTask(["a", "b"])
    plain = SlideSegmenter(backbone=make(), task=task).double().eval()
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
        assert (mine.grad is None) == (its.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(its.grad, mine.grad, rtol=0, atol=1e-9)


@needs_smp
def test_a_decoder_by_its_name() -> None:
    network = make_backbone("smp:fpn:tu-resnet10t")
    assert isinstance(network, SegmentationBackbone) and network.stride == 4 and network.out_channels == 128
    assert network.eval()(torch.rand(1, 3, 61, 83)).shape == (1, 128, 16, 21)
    with pytest.raises(UserError, match=r"makes no nonsense over tu-resnet10t.*smp:ARCHITECTURE:ENCODER"):
        make_backbone("smp:nonsense:tu-resnet10t")
    with pytest.raises(UserError, match="smp:ARCHITECTURE:ENCODER"):
        make_backbone("smp:unet:tu-resnet7")
