"""Results of any network on a slide, as OME-Zarr that lies on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from torch import Tensor, nn

from lightning_plugin import Box, SinkError, infer
from wsi_trainer import Slide, SlideSink
from wsi_trainer.io.files import read_json
from wsi_trainer.slide.views import Image
from wsi_trainer.synthetic import SlideSpec, write_slide

CLASSES = ["normal", "lesion", "fat"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 6, 4, stride=2, padding=1), nn.GroupNorm(2, 6), nn.ReLU())
        self.head = nn.Conv2d(6, len(CLASSES), 3, padding=1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.double() / 255))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slides") / "slide.tif"
    write_slide(path, SlideSpec(1200, 1100, seed=4, tissue=0.3))
    return path


class Stopped(SlideSink):
    """A sink that fails at its third box."""

    boxes = 0

    def write(self, box: Box, values: Tensor) -> None:
        self.boxes += 1
        if self.boxes == 3:
            raise OSError(28, "No space left on device")
        super().write(box, values)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_classes_and_values_lie_on_the_slide(slide: Path, tmp_path: Path) -> None:
    net = Net().eval()
    with Slide.open(slide) as opened:
        view = Image(opened)
        with torch.no_grad():
            scores = net(view.read(Box.whole(view.shape[2:])))
        infer(net, view, SlideSink(tmp_path / "a.ome.zarr", view, CLASSES), output="classes", tiles=(3, 2))
        infer(net, view, SlideSink(tmp_path / "b.ome.zarr", view), tiles=(3, 2))
    right = {"a": scores.argmax(1)[0].to(torch.uint8), "b": scores[0]}
    for name, values in right.items():
        multiscale = read_json(tmp_path / f"{name}.ome.zarr" / "zarr.json")["attributes"]["ome"]["multiscales"][0]
        assert [axis["name"] for axis in multiscale["axes"]] == list("cyx")[-values.dim() :]
        assert len(multiscale["datasets"]) == 2
        for level, dataset in enumerate(multiscale["datasets"]):
            found = zarr.open_array(tmp_path / f"{name}.ome.zarr" / dataset["path"], mode="r")[:]
            np.testing.assert_allclose(found, values[..., :: 2**level, :: 2**level], rtol=0, atol=1e-9)
            scale = dataset["coordinateTransformations"][0]["scale"]
            assert scale[-2:] == pytest.approx([view.place.mpp[0] * 2 ** (level + 1)] * 2)  # type: ignore[index]


@pytest.mark.slow
def test_a_store_that_was_interrupted_is_completed(slide: Path, tmp_path: Path) -> None:
    net, whole, other = Net(), tmp_path / "whole" / "a.ome.zarr", tmp_path / "a.ome.zarr"
    whole.parent.mkdir()
    with Slide.open(slide) as opened:
        view = Image(opened)
        infer(net, view, SlideSink(whole, view, CLASSES), output="classes", budget="6MiB")
        stopped = Stopped(other, view, CLASSES)
        with pytest.raises(SinkError, match=r"a.ome.zarr did not take the box .* No space left"):
            infer(net, view, stopped, output="classes", budget="6MiB")
        assert (tmp_path / "a.ome.zarr.boxes").exists()
        infer(net, view, SlideSink(other, view, CLASSES), output="classes", budget="6MiB")
    assert contents(other) == contents(whole)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_what_has_no_place_on_the_slide_is_refused(slide: Path, tmp_path: Path) -> None:
    with Slide.open(slide) as opened:
        view = Image(opened)
        for net, classes, output, message in [
            (Net(), CLASSES, "values", "takes classes"),
            (Net(), [], "classes", "takes values"),
            (nn.Sequential(Net(), nn.AdaptiveAvgPool2d((50, 1100))), [], "values", "no place on the slide"),
        ]:
            with pytest.raises(SinkError, match=message):
                infer(net, view, SlideSink(tmp_path / "a.ome.zarr", view, classes), output=output, tiles=2)  # type: ignore[arg-type]
        (tmp_path / "a.ome.zarr").mkdir()
        with pytest.raises(SinkError, match="is there already"):
            infer(Net(), view, SlideSink(tmp_path / "a.ome.zarr", view), tiles=2)
