"""A segmentation is a layer of the viewer, and two checkpoints of a run stand side by side."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.wsi_trainer.view.conftest import SHAPES, Made, make_run, open_page, serving
from wsi_trainer.errors import UserError
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import write_json
from wsi_trainer.regions.geojson import PathClass
from wsi_trainer.regions.ngff import add_levels, create_labels
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.view.contents import contents_of
from wsi_trainer.view.scene import Scene
from wsi_trainer.view.static_copy import write_static

CLASSES = ("normal", "tumour", "necrosis")


def labels_of(run: Run, seed: int) -> np.ndarray:
    """Write the classes of each second pixel of the slide of 1600 × 900 pixels, in squares, as `segment` does."""
    shape, folder = SHAPES[2], run.segments
    place = SlideTransform(shape, scale=(2, 2))
    coarse = np.random.default_rng(seed).integers(0, 3, (shape[0] // 32, shape[1] // 20), dtype=np.uint8)
    labels = coarse.repeat(16, 0).repeat(10, 1)
    folder.mkdir(parents=True)
    create_labels(folder / "two.ome.zarr", labels.shape, CLASSES, place)[:] = labels
    add_levels(folder / "two.ome.zarr", place)
    entry = {"labels": "two.ome.zarr", "outlines": "two.geojson", "regions": {}}
    write_json(folder / "segments.json", {"classes": CLASSES, "slides": {"slide 2 <&>.tif": entry}})
    return labels


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, list[np.ndarray]]:
    """A run with a segmentation by its best and by its last checkpoint, and the classes of both."""
    folder = tmp_path_factory.mktemp("labels")
    made = make_run(folder / "run", folder / "slides")
    made.folder.checkpoint_path("last").parent.mkdir(exist_ok=True)
    for name in ("best", "last"):
        made.folder.checkpoint_path(name).write_bytes(name.encode())
    last = Run.open(made.folder.path, "last")
    last.predictions_file("test").parent.mkdir(parents=True)
    shutil.copy(made.folder.predictions_file("test"), last.predictions_file("test"))
    return made, [labels_of(run, seed) for seed, run in enumerate((made.folder, last))]


def number_of(scene: Scene) -> int:
    return next(i for i, one in enumerate(scene.contents.slides) if one.name.startswith("slide 2"))


def test_classes_are_served_as_they_are_at_each_level(segmented: tuple[Made, list[np.ndarray]]) -> None:
    made, (labels, _) = segmented
    scene = Scene(contents_of(made.folder.path))
    slide = number_of(scene)
    about = scene.about(slide)["layers"][1]
    assert (about["title"], about["rows"], about["columns"], about["stride"]) == ("segmentation", *labels.shape, 2)
    assert [one["name"] for one in about["classes"]] == [*CLASSES]
    assert about["classes"][2]["colour"] == list(PathClass.of("necrosis", 2).colour)
    for level in range(about["levels"]):
        expected = labels[:: 2**level, :: 2**level][:256, :256]
        found = np.frombuffer(scene.numbers(slide, "1", level, 0, 0), "<f4").reshape(expected.shape)
        np.testing.assert_array_equal(found, expected)
    assert scene.at(slide, "1", 401, 333)["class"] == CLASSES[labels[333 // 2, 401 // 2]]
    assert scene.top(slide, "1", 3) == {"places": []} and scene.outlines(slide, "1", 0.5) == {"polygons": []}
    scene.close()


def test_a_damaged_segmentation_is_named(segmented: tuple[Made, list[np.ndarray]], tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(segmented[0].folder.path, copy)
    write_json(copy / "segments" / "two.ome.zarr" / "zarr.json", {"attributes": {}})
    scene = Scene(contents_of(copy))
    assert "is damaged" in scene.about(number_of(scene))["layers"][1]["broken"]
    scene.close()
    write_json(
        copy / "segments" / "segments.json",
        {"classes": CLASSES, "slides": {"s": {"labels": "../../x", "outlines": "o"}}},
    )
    with pytest.raises(UserError, match="outside of the run"):
        contents_of(copy)


SHOWN = """([pane, places]) => {
  const canvas = document.querySelector(`#${pane} canvas.layers`);
  const copy = Object.assign(document.createElement('canvas'), { width: canvas.width, height: canvas.height });
  const context = copy.getContext('2d', { willReadFrequently: true }); // else the browser advises it in the console
  context.drawImage(canvas, 0, 0);
  const picture = context.getImageData(0, 0, canvas.width, canvas.height);
  const at = (size, place, centre) => Math.floor(size / 2 + (place - centre) * 0.5);
  return places.map(([x, y]) => {
    const first = 4 * (at(canvas.height, y, 800) * canvas.width + at(canvas.width, x, 450));
    return Array.from(picture.data.slice(first, first + 4));
  });
}"""
"""The colours at places of the slide, in a view with x=450, y=800 in its middle at half the size."""
OPAQUE = "() => { const o = document.getElementById('opacity'); o.value = 1; o.dispatchEvent(new Event('input')); }"


def test_two_checkpoints_stand_side_by_side(
    page: Any, segmented: tuple[Made, list[np.ndarray]], tmp_path: Path
) -> None:
    made, both = segmented
    scene = Scene(contents_of(made.folder.path, made.folder.checkpoint_path("last")))
    assert scene.contents.runs == ("run", "run, last")
    write_static(scene, tmp_path / "copy", ["slide 2 <&>.tif"], 0)
    colours = [[0, 0, 0, 0], *([*PathClass.of("", number).colour, 255] for number in (1, 2))]
    places = [(x, y) for y in range(655, 950, 32) for x in range(315, 590, 20)]
    with serving(scene) as served:
        for address in (served.address, (tmp_path / "copy" / "index.html").as_uri()):
            open_page(page, f"{address}#slide=slide+2+%3C%26%3E.tif&side=1&x=450&y=800&scale=0.5")
            assert "run, last: segmentation" in page.locator("#right .caption").text_content()
            page.locator("#layer-left").select_option(label="run: segmentation")
            page.evaluate(OPAQUE)
            page.wait_for_load_state("networkidle")
            assert page.locator("#classes li").all_inner_texts() == ["tumour", "necrosis"]
            assert page.locator("#of-numbers").is_hidden()
            for pane, labels in zip(("left", "right"), both, strict=True):
                expected = [colours[labels[y // 2, x // 2]] for x, y in places]
                for _ in range(120):  # it is drawn when it has come
                    if (shown := page.evaluate(SHOWN, [pane, places])) == expected:
                        break
                    page.wait_for_timeout(250)
                assert shown == expected
            page.screenshot(path=tmp_path / "both.png")
