"""From drawn regions to predicted ones: fit, test, predict, segment, report, on slides of a few pixels."""

import base64
import io
import re
import shutil
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import scipy.ndimage
import shapely
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from scipy.spatial.distance import cdist
from skimage.segmentation import find_boundaries

from lightning_plugin import Box, TensorSource, TiledModule, infer
from lightning_plugin.sink import ArraySink
from tests.wsi_trainer.small import QUICK, UNET, regions, rows
from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.explain.maps import Segmented
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json
from wsi_trainer.metrics import (
    AREA_SCORES,
    SCORES,
    AreaPredictions,
    BorderPredictions,
    ClassPredictions,
    LesionPredictions,
    read_predictions,
)
from wsi_trainer.models import SegmentationTask, SlideSegmenter, UNet
from wsi_trainer.regions import ngff
from wsi_trainer.regions.ngff import add_levels, create_labels
from wsi_trainer.regions.outlines import read_regions
from wsi_trainer.regions.shapes import joined, pieces, polygons_of
from wsi_trainer.regions.target import Legend, blocks_of, open_target
from wsi_trainer.report.contents import RunResults
from wsi_trainer.report.pictures import regions_picture
from wsi_trainer.segment.predict import ClassOfPixels, Regions
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.slide.slide import Slide
from wsi_trainer.synthetic import generate
from wsi_trainer.view.contents import contents_of
from wsi_trainer.view.scene import Scene


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("regions")
    splits = {"train": 0.5, "val": 0.25, "test": 0.25}
    manifest = generate(folder, slides=8, seed=1, splits=splits, workers=1, shape=(192, 256))
    words = [f"--out={folder / 'run'}", f"--data.manifest={manifest}", *regions(), "--train.budget=64MiB"]
    words.append("--train.precision=64-true")  # in float32 `test` and `segment` may round a tie apart
    assert main(["fit", *words]) == 0
    return Run(folder / "run")


@pytest.fixture(scope="module")
def segmented(run: Run) -> Run:
    """A copy of the run with its test slides segmented, in boxes smaller than a slide."""
    copy = Run(run.path.with_name("segmented"))
    shutil.copytree(run.path, copy.path)
    assert main(["segment", str(copy.path), "--smallest=0", "--tolerance=3", "--train.budget=2MiB"]) == 0
    return copy


@pytest.mark.slow
def test_the_scores_are_those_of_the_written_labels(segmented: Run) -> None:
    run = segmented
    predictions = read_predictions(run.predictions_file("test"))
    assert isinstance(predictions, AreaPredictions) and predictions.classes == ("normal", "lesion")
    found = read_json(run.segments / "segments.json")["slides"]
    records = {record.slide: record for record in read_manifest(run.splits, labelled=False)}
    legend = Legend.of(["normal", "lesion"], None, None)
    for row, slide in enumerate(predictions.slides):
        labels = zarr.open_array(run.path / "segments" / found[slide]["labels"] / "0", mode="r")[:]
        path = Path(records[slide].others["regions"])
        truth = open_target(path, legend, records[slide].path, labels.shape, SlideTransform(labels.shape))
        truth = truth.read(Box.whole(labels.shape))[0, 0].numpy()
        for place in (0, 1):
            here, there = labels == place, truth == place
            expected = [(here & there).sum(), here.sum(), there.sum()]
            assert predictions.pixels[row, :, place].tolist() == expected
        # The outlines, rasterised again, are the labels.
        outlines = run.path / "segments" / found[slide]["outlines"]
        again = open_target(outlines, legend, records[slide].path, labels.shape, SlideTransform(labels.shape))
        again = again.read(Box.whole(labels.shape))
        assert np.array_equal(again[0, 0], labels)


def test_borders_and_lesions_of_the_written_labels(segmented: Run) -> None:
    run = segmented
    folder = run.path / "segments"
    borders, lesions = BorderPredictions.read(folder / "borders.csv"), LesionPredictions.read(folder / "lesions.csv")
    records = {record.slide: record for record in read_manifest(run.splits, labelled=False)}
    names = read_json(folder / "segments.json")["slides"]
    for row, slide in enumerate(borders.slides):
        labels = zarr.open_array(folder / names[slide]["labels"] / "0", mode="r")[:] == 1
        drawn = read_regions(Path(records[slide].others["regions"])) if records[slide].others["regions"] else []
        y, x = np.mgrid[: labels.shape[0], : labels.shape[1]] + 0.5
        inside = [shapely.contains_xy(shapely.Polygon(its.rings[0], its.rings[1:]), x, y) for its in drawn]
        truth = np.logical_or.reduce(inside) if inside else np.zeros(labels.shape, bool)
        size = Slide.open(records[slide].path).resolution
        assert size is not None
        pixel = size.y, size.x
        mine, other = (np.argwhere(find_boundaries(mask, 1, "inner")) * pixel for mask in (labels, truth))
        away = cdist(mine, other) if len(mine) and len(other) else np.full((len(mine), len(other) or 1), np.inf)
        near = [(away.min(axis=axis) <= 3).sum() if min(away.shape) else 0 for axis in (1, 0)]
        expected = [near[0], len(mine), near[1] if len(other) else 0, len(other)]
        assert borders.pixels[row, :, 1].tolist() == expected
        assert len(lesions.marks[row][0].lesions) == scipy.ndimage.label(truth)[1]
    scores = read_json(folder / "scores.json")
    assert scores["split"] == "test" and scores["tolerance"] == 3 and scores["without_micrometres"] == []
    assert set(scores["lesions"]["slide"]) == {"froc", "1/4", "1/2", "1", "2", "4", "8"}
    assert main(["report", str(run.path)]) == 0
    page = run.report.read_text()
    assert "Borders by class, within 3 µm" in page and "Lesions detected by class" in page and "FROC, " in page
    assert page.count('title="regions"') == len(borders.slides) and "found ones in red" in page
    assert re.search(r"the classes found are\s+<span[^>]*></span> lesion", page)


def test_the_report_fills_what_was_found_in_the_colour_of_its_class(segmented: Run) -> None:
    for slide, its in Segmented.of(segmented).items():
        assert its.labels is not None
        path = next(one.path for one in segmented.kept() if one.slide == slide)
        pictures = (regions_picture(path, None, Segmented(None, one), 192) for one in (its.labels, None))
        filled, bare = map(picture_of, pictures)
        labels = Image.fromarray(np.asarray(its.labels.load()[0][0][:]))
        inside = np.asarray(labels.resize(filled.shape[1::-1], Image.Resampling.NEAREST)) == 1
        changed = np.abs(filled - bare).max(axis=2)
        assert changed[scipy.ndimage.binary_erosion(~inside, iterations=9)].max(initial=0) < 4
        core = scipy.ndimage.binary_erosion(inside, iterations=3)
        assert not core.any() or np.median(changed[core]) > 20


def picture_of(address: str | None) -> np.ndarray:
    """The pixels of a picture in a page."""
    assert address is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))), np.int16)


@pytest.mark.slow
def test_the_viewer_shows_drawn_and_found_regions(segmented: Run) -> None:
    run, contents = segmented, contents_of(segmented.path)
    found = read_json(run.segments / "segments.json")["slides"]
    records = {record.slide: record for record in read_manifest(run.splits, labelled=False)}
    with closing(Scene(contents)) as scene:
        for number, slide in enumerate(contents.slides):
            paths = {"drawn": Path(records[slide.name].others["regions"])}
            if slide.name in found:
                paths["found"] = run.segments / found[slide.name]["outlines"]
            shown = [(one["kind"], one["rings"]) for one in scene.regions(number)["polygons"]]
            expected = [(kind, its.rings) for kind, path in paths.items() for its in read_regions(path)]
            assert shown == [(kind, [ring.tolist() for ring in rings]) for kind, rings in expected]
            assert scene.about(number)["regions"]
    assert found, "some slides were segmented"
    first, *_ = found  # files that are not at hand are left out
    for gone in (Path(records[first].others["regions"]), run.segments / found[first]["outlines"]):
        gone.rename(gone.with_suffix(".gone"))
    try:
        assert main(["report", str(run.path)]) == 0
        assert run.report.read_text().count('title="regions"') == len(found), "their label images are"
        (slide,) = (one for one in contents_of(run.path).slides if one.name == first)
        assert slide.regions is None and slide.found is None
    finally:
        for gone in (Path(records[first].others["regions"]), run.segments / found[first]["outlines"]):
            gone.with_suffix(".gone").rename(gone)


def test_without_drawn_regions_or_unasked_there_are_no_scores(run: Run, tmp_path: Path) -> None:
    slide = read_manifest(run.splits, labelled=False)[0].path
    (tmp_path / "a.tif").write_bytes(slide.read_bytes())
    (tmp_path / "list.csv").write_text("slide\na.tif\n")
    other = run.of_cohort("list").segments
    for words, folder in (([f"--slides={tmp_path / 'list.csv'}"], other), (["--compare=false"], run.segments)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "scores.json").write_text("{}")  # of an earlier command
        assert main(["segment", str(run.path), "--overwrite", *words]) == 0
        assert not [name for name in ("scores.json", "borders.csv", "lesions.csv") if (folder / name).exists()]


@pytest.mark.slow
def test_what_was_found_on_two_splits_stays_side_by_side(segmented: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run = segmented
    first = {path: path.read_bytes() for path in run.segments.rglob("*") if path.is_file()}
    assert main(["segment", str(run.path), "--split=val"]) == 0
    assert {path: path.read_bytes() for path in first} == first
    assert main(["segment", str(run.path), "--split=val"]) == 2
    assert "give --overwrite" in capsys.readouterr().err
    found = {slide.name: slide.found for slide in contents_of(run.path).slides if slide.split in ("val", "test")}
    assert found and all(path is not None and path.is_file() for path in found.values())
    assert main(["validate", str(run.path)]) == 0
    results = RunResults.load("run", run, "val")
    assert results.regions is not None and set(results.regions.lesions.slides) == set(results.predictions.slides)


def test_lesions_are_joined_where_asked(run: Run) -> None:
    """All on a slide of 96 x 128 µm, within 75 µm of each other."""
    assert main(["segment", str(run.path), "--overwrite", "--join=75"]) == 0
    lesions = LesionPredictions.read(run.segments / "lesions.csv")
    assert {len(marks[0].lesions) for marks in lesions.marks} <= {0, 1}
    assert read_json(run.segments / "scores.json")["join"] == 75


@pytest.mark.parametrize(
    ("word", "said"),
    [("--block=0", "--block is 0"), ("--tolerance=-1", "--tolerance is -1"), ("--join=-1", "--join is -1")],
)
def test_options_without_sense_are_named(run: Run, capsys: pytest.CaptureFixture[str], word: str, said: str) -> None:
    assert main(["segment", str(run.path), "--overwrite", word]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_slide_that_cannot_be_read_is_left_out_where_errors_are_skipped(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = read_manifest(run.splits, labelled=False)[0].path
    (tmp_path / "broken.tif").write_bytes(whole.read_bytes()[:3000])
    (tmp_path / "whole.tif").write_bytes(whole.read_bytes())
    (tmp_path / "list.csv").write_text("slide\nbroken.tif\nwhole.tif\n")
    words = ["segment", str(run.path), "--overwrite", f"--slides={tmp_path / 'list.csv'}", "--name=broken"]
    assert main(words) == 2
    assert "broken.tif" in capsys.readouterr().err
    assert main([*words, "--data.on_error=skip"]) == 0
    assert "left out: broken.tif" in " ".join(capsys.readouterr().out.split())
    told = read_json(run.path / "cohorts" / "broken" / "segments" / "segments.json")
    assert list(told["slides"]) == ["whole.tif"]
    assert list(told["skipped"]) == ["broken.tif"]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 1300), st.integers(1, 1100), st.integers(0, 9))
def test_coarser_levels_take_every_second_label(height: int, width: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 3, (height, width), np.uint8)
    place = SlideTransform((9000, 9000), (50.0, 30.0), (2.0, 2.0), mpp=(0.25, 0.125))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "s.ome.zarr"
        create_labels(path, values.shape, ["a", "b", "c"], place)[:] = values
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ngff, "BAND", 128)
            add_levels(path, place)
        datasets = read_json(path / "zarr.json")["attributes"]["ome"]["multiscales"][0]["datasets"]
        for level, dataset in enumerate(datasets):
            found = zarr.open_array(path / dataset["path"], mode="r")[:]
            assert np.array_equal(found, values[:: 2**level, :: 2**level])
            scale, shift = (step[step["type"]] for step in dataset["coordinateTransformations"])
            assert scale == [0.5 * 2**level, 0.25 * 2**level]
            # The outer corner of all levels is that of level 0; the centre of the slide's first pixel is at 0.
            first = [(50 - 0.5) * 0.25, (30 - 0.5) * 0.125]
            assert [at - step / 2 for at, step in zip(shift, scale)] == pytest.approx(first)
        assert max(found.shape) <= 512


def test_scores_with_intervals_report_and_predictions(run: Run, tmp_path: Path) -> None:
    scores = read_json(run.evaluation("test"))
    assert set(scores["slide"]) == {"dice", "slide_dice", "mean_iou", "pixel_accuracy"}
    assert set(scores["per_class"]["lesion"]) == {"dice", "iou", "recall", "precision"}
    assert "patient" in scores
    assert main(["report", str(run.path)]) == 0
    page = run.report.read_text()
    assert "right_" not in page and "lesion" in page and "wsi-train heatmap" not in page
    assert main(["predict", str(run.path), str(run.splits)]) == 0
    found = rows(run.path / "cohorts" / "splits" / "predictions.csv")
    assert len(found) == 8
    assert all(float(row["share_normal"]) + float(row["share_lesion"]) == pytest.approx(1) for row in found)


def test_a_heat_map_of_pixels_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["heatmap", str(run.path), "--overwrite"]) == 2
    assert "wsi-train segment" in capsys.readouterr().err


def test_boxes_are_those_of_the_whole_slide() -> None:
    torch.manual_seed(0)
    model = SlideSegmenter(backbone=UNet((4, 6, 8), norm="batch"), task=SegmentationTask(["a", "b", "c"])).eval()
    image = torch.randint(0, 256, (1, 3, 150, 203), dtype=torch.uint8)
    with torch.no_grad():
        logits = model(image)[0]
    whole, sure = logits.argmax(0).numpy(), logits.softmax(0).amax(0).numpy()
    first, second = logits.topk(2, 0).values
    labels, written = np.full(whole.shape, 99, np.uint8), []
    found = Regions(ArraySink(labels[None]), 3, written.append)
    infer(TiledModule(ClassOfPixels(model, probability=True), tiles=(2, 3)), TensorSource(image), found)
    tied = (first - second < 1e-5).numpy()
    assert np.array_equal(labels[~tied], whole[~tied]) and tied.mean() < 0.001
    assert len(written) == 6 and sum(written) == whole.size
    for number, (polygons, points) in enumerate(zip(found.parts, found.points, strict=True), start=1):
        assert sum(polygon.area for polygon in polygons) == (labels == number).sum()
        for x, y, probability in points:
            assert labels[int(y), int(x)] == number
            assert probability == pytest.approx(sure[int(y), int(x)], rel=1e-5)
        assert points[:, 2].max() == pytest.approx(sure[labels == number].max(), rel=1e-5)


@given(arrays(bool, st.tuples(st.integers(1, 20), st.integers(1, 20))), st.integers(1, 9))
def test_outlines_hold_the_pixels_of_the_mask(mask: np.ndarray, side: int) -> None:
    parts = []
    for box in blocks_of(*mask.shape, side):
        parts += pieces(mask[box.lo[0] : box.hi[0], box.lo[1] : box.hi[1]], box.lo)
    found = joined(parts)
    y, x = np.mgrid[: mask.shape[0], : mask.shape[1]]
    assert sum(polygon.area for polygon in found) == mask.sum()
    assert np.array_equal(shapely.contains_xy(shapely.union_all(found), x + 0.5, y + 0.5), mask)
    pixels = shapely.union_all(shapely.box(x[mask], y[mask], x[mask] + 1, y[mask] + 1))
    regions = polygons_of(pixels)
    assert sorted(map(normal, found)) == sorted(map(normal, regions)), "each region is one, with all its holes"


def normal(polygon: shapely.Polygon) -> bytes:
    """The same for polygons that differ in where their rings begin."""
    return shapely.to_wkb(shapely.normalize(polygon.simplify(0)))


@pytest.mark.slow
def test_a_label_of_the_slide_is_learnt_and_scored_beside(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = "{class_path: BinaryTask, init_args: {positive_weight: balanced}}"
    targets = f"{{regions: {{name: segmentation, classes: [normal, lesion]}}, label: {beside}}}"
    words = [
        *UNET, *QUICK, f"--data.manifest={run.path.parent / 'manifest.csv'}", f"--out={tmp_path / 'run'}",
        f"--model.targets={targets}", "--model.target_weights={label: 0.5}", "--train.budget=null",
        "--train.monitor=val_label_brier", "--model.head=MaxPooling",
    ]  # fmt: skip
    assert main(["fit", *words]) == 0
    folder = Run(tmp_path / "run")
    scores, predictions = read_json(folder.evaluation("test")), read_predictions(folder.predictions_file("test"))
    areas, labels = predictions.by_target["regions"], predictions.by_target["label"]
    assert isinstance(labels, ClassPredictions)
    assert scores["slide"]["dice"]["value"] == pytest.approx(AREA_SCORES["dice"](areas), nan_ok=True)
    assert scores["slide"]["label_brier"]["value"] == pytest.approx(SCORES["brier"](labels))
    assert set(scores["per_class"]) == {"normal", "lesion"} and set(scores["label_per_class"]) == {"0", "1"}
    records = {record.slide: record for record in read_manifest(folder.splits)}
    assert [records[slide].label for slide in labels.slides] == [str(number) for number in labels.labels]
    assert any(row.get("val_label_brier") for row in rows(next(folder.metrics.rglob("metrics.csv"))))
    assert main(["predict", str(folder.path), str(folder.splits)]) == 0
    assert "probability_1" in (folder.path / "cohorts" / "splits" / "predictions.csv").read_text().splitlines()[0]
    assert main(["segment", str(folder.path), "--overwrite"]) == 0
    assert main(["report", str(folder.path)]) == 0
    assert "Results by class of label" in folder.report.read_text()
    capsys.readouterr()
    absent = tmp_path / "absent.csv"
    absent.write_text(folder.splits.read_text().replace(",1,", ",,"))
    assert main(["fit", *words, f"--data.manifest={absent}", f"--out={tmp_path / 'other'}"]) == 2
    printed = capsys.readouterr()
    assert "the target label is not known of 4 of 8 slides" in " ".join(printed.out.split())
    assert "of the target label, slides of the class '0' only" in printed.err
