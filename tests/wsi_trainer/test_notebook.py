"""`import wsi_trainer as wt`: what it imports, what its objects show, and the tables that go out and come in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import tifffile
from PIL import Image

import wsi_trainer as wt
from tests.wsi_trainer.small import QUICK, VGG
from tests.wsi_trainer.view.conftest import LABELS, POSITIVE, SHAPES, Made, make_run
from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest, write_manifest
from wsi_trainer.errors import UserError
from wsi_trainer.explain.maps import Maps
from wsi_trainer.fit.predictor import Attention
from wsi_trainer.fit.study import Study
from wsi_trainer.io.files import write_json
from wsi_trainer.metrics import (
    SCORES,
    BorderPredictions,
    ClassPredictions,
    MultiTargetPredictions,
    ValuePredictions,
    summarise,
)
from wsi_trainer.models.encoders import ENCODERS
from wsi_trainer.notebook import MOST_CELLS, on_grid
from wsi_trainer.slide.places import Places
from wsi_trainer.synthetic import generate

pandas = pytest.importorskip("pandas")
matplotlib.use("agg")

HEAVY = {"torch", "pytorch_lightning", "lightning_plugin", "jsonargparse", "sklearn", "zarr", "matplotlib", "pandas"}
STEPS = """
import json, sys
said = {}
def note(step):
    said[step] = sorted({name.partition(".")[0] for name in sys.modules} & set(HEAVY)), len(sys.modules)
note("python")
import wsi_trainer as wt
note("package")
run = wt.Run.open(sys.argv[1])
note("open")
repr(run), run._repr_html_()
note("card")
run.slides, run.predictions("test")
note("tables")
print(json.dumps(said))
"""


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A run with predictions and scores, whose folder says what `fit` says."""
    made = make_run(tmp_path / "first", tmp_path / "slides")
    config = "model: {backbone: {name: vgg}, head: {class_path: wsi_trainer.models.MaxPooling}, task: binary}\n"
    made.folder.config.write_text(config + "data: {manifest: x.csv}\ntrain: {monitor: val_loss}\n")
    predictions = wt.read_predictions(made.folder.predictions_file("test"))
    write_json(made.folder.evaluation("test"), {"split": "test", **summarise(predictions, SCORES, 50)})
    metrics = made.folder.metrics / "version_0" / "metrics.csv"
    metrics.parent.mkdir(parents=True)
    metrics.write_text("epoch,step,train_loss,val_loss\n0,1,,0.7\n0,1,0.8,\n1,2,,0.25\n1,2,0.4,\n2,3,,0.5\n")
    return made


def test_a_run_is_opened_and_shown_without_what_its_model_needs(made: Made) -> None:
    command = [sys.executable, "-c", f"HEAVY = {sorted(HEAVY)}\n{STEPS}", str(made.folder.path)]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert said["package"][1] - said["python"][1] <= 12  # of the standard library, for typing
    assert said["open"][0] == said["card"][0] == [] and said["card"][1] < 900
    assert said["tables"][0] == ["pandas"]


def test_the_package_names_what_it_has(made: Made) -> None:
    assert set(wt.__all__) <= set(dir(wt))
    for name in wt.__all__:
        assert getattr(wt, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Slde'"):
        _ = wt.Slde  # type: ignore[attr-defined]


def test_a_slide_says_what_it_is(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (300, 1200, 3), np.uint8)
    path = tmp_path / "a <b>.tif"
    tifffile.imwrite(path, pixels, tile=(64, 64), photometric="rgb", resolution=(20000, 20000), resolutionunit=3)
    with wt.Slide.open(path) as slide:
        assert repr(slide).startswith("Slide a <b>.tif: 1\u202f200 × 300 px (width × height), 0.5 µm/px, 1 level, ")
        html = slide._repr_html_()
        assert "a &lt;b&gt;.tif" in html and "<b>" not in html and "0.5 µm/px" in html
        (picture,) = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', html)
        assert picture
    plain = tmp_path / "plain.png"
    Image.fromarray(pixels).save(plain)
    with wt.Slide.open(plain) as slide:
        assert "of unknown size" in repr(slide)


def test_a_slide_whose_pixels_are_damaged_says_so_on_its_card(tmp_path: Path) -> None:
    path = tmp_path / "s.tif"
    tifffile.imwrite(path, np.full((64, 64, 3), 200, np.uint8), tile=(64, 64), photometric="rgb", compression="jpeg")
    with tifffile.TiffFile(path) as file:
        start = file.pages[0].dataoffsets[0]
    content = bytearray(path.read_bytes())
    content[start : start + 400] = b"\0" * 400
    path.write_bytes(content)
    with wt.Slide.open(path) as slide:
        assert "64 × 64 px" in slide._repr_html_() and "<em>" in slide._repr_html_()


@pytest.mark.slow
def test_a_plot_lies_in_pixels_of_the_original_slide(tmp_path: Path) -> None:
    slides = tmp_path / "slides"
    manifest = generate(slides, slides=12, side=256, seed=1)
    assert main(["preprocess", str(manifest), str(tmp_path / "coarse"), "--mpp=1", "--workers=1"]) == 0
    record = read_manifest(manifest)[0]
    with wt.Slide.open(record.path) as slide, wt.Slide.open(tmp_path / "coarse" / "slide_0000.zarr") as store:
        height, width = slide.shape
        assert store.shape != slide.shape
        for shown in (slide, store):
            axes = shown.plot(tissue=True, side=100)
            left, right = axes.get_xlim()
            bottom, top = axes.get_ylim()
            assert (left, top) == (0, 0) and abs(right - width) <= 2 and abs(bottom - height) <= 2
            (said,) = [text.get_text() for text in axes.texts]
            (bar,) = [line for line in axes.lines if len(line.get_xdata()) == 2]
            begin, end = bar.get_xdata()
            assert said == "20 µm" and (end - begin) * 0.5 == pytest.approx(20)
    matplotlib.pyplot.close("all")


def test_a_run_says_what_it_is(made: Made) -> None:
    run = wt.Run.open(made.folder.path)
    assert repr(run) == (
        "Run first: binary (a, b); 4 test slides; val_loss 0.25 in epoch 2 of 3; "
        "auc 0.500 (no interval: 4 patients, of 10 needed) of test"
    )
    html = run._repr_html_()
    for text in ("vgg and MaxPooling", "2 × a, 2 × b", "val_loss 0.25 in epoch 2 of 3", "balanced_accuracy"):
        assert text in html, text
    run.evaluation("test").unlink()
    run.splits.unlink()  # as in the folder of folds
    run.config.write_text("model: {}\n")
    assert repr(wt.Run.open(made.folder.path)) == "Run first: no list of slides; val_loss 0.25 in epoch 2 of 3"


def test_predictions_say_what_they_are(made: Made) -> None:
    path = made.folder.predictions_file("test")
    found = wt.read_predictions(str(path))
    assert repr(found) == "ClassPredictions: 4 slides of 4 patients; label: a, b"
    html = found._repr_html_()
    assert html.count("<tr>") == 2 + len(found) and "probability_a" in html
    assert found.to_frame().equals(wt.Run.open(made.folder.path).predictions("test"))
    stage = ValuePredictions(found.slides, found.patients, np.array([1.0, np.nan, 3.0, 4.0]), np.ones(4))
    both = MultiTargetPredictions.of({"<b>": found, "stage": stage})
    assert repr(both).endswith("; <b>: a, b; stage: a number, known of 3")
    assert "<b>" not in both._repr_html_() and "stage" in both._repr_html_()
    counts = np.arange(2 * 4 * 2, dtype=float).reshape(2, 4, 2)
    borders = BorderPredictions(("s", "t"), ("p", "p"), ("normal", "lesion"), counts)
    assert repr(borders) == "BorderPredictions: 2 slides of 1 patients; regions: normal, lesion"
    assert "found_near_lesion" in borders._repr_html_()


def test_tables_of_a_run(made: Made) -> None:
    run = wt.Run.open(made.folder.path)
    slides, said = run.slides, run.predictions("test")
    assert slides["slide"].tolist() == said["slide"].tolist() == [f"slide {i} <&>.tif" for i in range(len(SHAPES))]
    assert slides["split"].unique().tolist() == ["test"] and slides["label"].tolist() == ["a", "b", "a", "b"]
    assert said["probability_b"].tolist() == list(POSITIVE)
    assert said["predicted"].tolist() == ["b", "b", "a", "a"]
    assert said["wrong"].tolist() == [True, False, False, True] and said["label"].tolist() == [
        ("a", "b")[label] for label in LABELS
    ]
    assert len(slides.merge(said, on="slide")) == 4


def test_two_runs_are_compared_on_the_slides_that_both_have(made: Made, tmp_path: Path) -> None:
    other = make_run(tmp_path / "second", tmp_path / "slides", (0.1, 0.7, 0.65, 0.6))
    found = made.folder.compare(wt.Run.open(other.folder.path))
    assert found.columns.tolist() == ["first", "second", "difference", "low", "high", "patients"]
    assert found.loc["auc", "first"] == 0.5 and found.loc["auc", "second"] == 0.75
    assert (found["difference"] == found["first"] - found["second"]).all()
    write_manifest(other.folder.splits, other.folder.kept()[:2])
    wt.read_predictions(other.folder.predictions_file("test")).take(np.array([1, 0])).write(
        other.folder.predictions_file("test")
    )
    assert made.folder.compare(other.folder).loc["auc", "second"] == 1


def test_a_study_is_a_table_of_its_runs(tmp_path: Path) -> None:
    folds = ("fold0", "fold1")
    study = Study(tmp_path / "study", "folds", folds, folds, "test")
    for number, name in enumerate(folds):
        chance, labels = np.random.default_rng(number), np.arange(12) % 2
        positive = (chance.random(12) + labels) / 2
        slides = tuple(f"s{number} {row}" for row in range(12))
        said = np.stack([1 - positive, positive], axis=1)
        ClassPredictions(slides, slides, ("a", "b"), labels, said).write(study.runs[name].predictions_file("test"))
    study.write()
    opened = wt.Study.open(study.path)
    assert "folds" in opened._repr_html_()
    with pytest.raises(UserError, match=r"no cross_validation.json yet"):
        opened.table()
    facts = study.cross_validate(SCORES, 20, 0, "patient")
    table = opened.table()
    assert table.columns.tolist() == [*folds, "mean", "sd", "pooled", "low", "high"]
    assert table.loc["auc", "mean"] == facts["mean"]["auc"] and table.loc["auc", "low"] == facts["pooled"]["auc"]["low"]
    assert f"{facts['pooled']['auc']['value']:.3f}" in opened._repr_html_()
    pair = Study(tmp_path / "study", "comparison", folds, folds, "test")
    for row, name in enumerate(folds):
        said = np.stack([1 - labels, labels], axis=1) if row else np.full((12, 2), 0.5)
        ClassPredictions(slides, slides, ("a", "b"), labels, said).write(pair.runs[name].predictions_file("test"))
    write_json(pair.results, pair.compare(SCORES, 20, 0))
    assert pair.table().loc["auc"][["fold0", "fold1", "difference"]].tolist() == [0.5, 1, -0.5]


def test_a_table_of_a_notebook_is_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells: dict[str, list[Any]] = {
        "slide": ["003.tif", "4.tif", "ü .tif"],
        "label": [1, None, 0],  # which makes floats of them
        "patient": [7, 8, np.nan],
        "amount": [0.25, 2.0, np.inf],
        "drawn": [True, False, pandas.NA],
    }
    given = pandas.DataFrame(cells, index=[5, 5, 9])
    records = read_manifest(given, labelled=False)
    assert [record.label for record in records] == ["1", "", "0"]
    assert [record.patient for record in records] == ["7", "8", "ü .tif"]
    assert [record.others["amount"] for record in records] == ["0.25", "2", "inf"]
    assert [record.others["drawn"] for record in records] == ["True", "False", ""]
    assert records[0].path == Path("003.tif")
    with pytest.raises(UserError, match=r"the DataFrame, line 2: the column 'label' is empty"):
        read_manifest(given)
    with pytest.raises(UserError, match=r"the DataFrame has no column 'label'; its columns are slide, Label"):
        read_manifest(given[["slide", "label"]].rename(columns={"label": "Label"}))
    with pytest.raises(UserError, match="the column 'slide' twice"):
        read_manifest(pandas.concat([given, given[["slide"]]], axis=1))


def test_tables_without_pandas_name_the_extra(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = wt.Run.open(made.folder.path)
    for table in (lambda: run.slides, run.predictions, lambda: run.compare(run), wt.encoders):
        with pytest.raises(UserError, match=r"pip install 'wsi-trainer\[notebook\]'"):
            table()
    assert repr(run).startswith("Run first")


def test_encoders_are_a_table() -> None:
    found = wt.encoders()
    assert len(found) == len(ENCODERS) and found.loc["uni", "width"] == 1024


def test_attention_lies_on_the_squares_that_it_is_of(tmp_path: Path) -> None:
    points = np.array([[16.0, 8.0], [48.0, 8.0], [16.0, 40.0]])
    weights = np.array([0.5, 0.25, 0.25], np.float32)
    attention = Attention(weights, Places(tmp_path, points, side=32.0))
    means, first = on_grid(attention)
    np.testing.assert_array_equal(means, [[0.5, 0.25], [0.25, np.nan]])
    assert first == (16.0, 8.0, 32.0)
    found = attention.to_frame()
    assert found[["x", "y"]].to_numpy().tolist() == points.tolist() and found["weight"].sum() == 1
    assert on_grid(Attention(weights, Places(tmp_path, points + 16, middle=True, side=32.0)))[1] == first
    many = np.stack(np.meshgrid(np.arange(3000.0), np.arange(2.0)), axis=-1).reshape(-1, 2)
    means, (_, _, cell) = on_grid(Attention(np.ones(6000, np.float32), Places(tmp_path, many, side=1.0)))
    assert means.shape == (1, MOST_CELLS) and (means == 1).all() and cell == pytest.approx(3000 / MOST_CELLS, rel=0.01)


@pytest.mark.slow
def test_several_slides_are_predicted_as_a_table_and_attention_is_that_of_the_heat_map(tmp_path: Path) -> None:
    manifest = generate(tmp_path / "slides", slides=12, side=96, seed=1)
    words = [f"--out={tmp_path / 'run'}", f"--data.manifest={manifest}", *VGG, *QUICK, "--model.head=abmil"]
    assert main(["fit", *words]) == 0
    run = wt.Run.open(tmp_path / "run")
    test = run.slides[run.slides["split"] == "test"]
    tested = run.predictions("test")
    by_path, by_table = run.predict(test["path"].tolist()), run.predict(test)
    for found, names in ((by_path, [Path(path).name for path in test["path"]]), (by_table, test["slide"].tolist())):
        assert found["slide"].tolist() == names
        assert found["probability_1"].tolist() == tested["probability_1"].tolist()
    assert by_table["patient"].tolist() == test["patient"].tolist()
    assert run.predict(test["path"].iloc[0]) == by_path.iloc[0][["probability_0", "probability_1"]].to_dict()
    cohort = run.test(run.slides, name="all")
    assert cohort.predictions()["slide"].tolist() == test["slide"].tolist(), "slides of training are left out"
    assert cohort.predictions()["probability_1"].tolist() == tested["probability_1"].tolist()
    assert repr(cohort).startswith("Run run, all: ")
    with pytest.raises(UserError, match="--overwrite"):
        run.test(run.slides, name="all")
    assert main(["heatmap", str(run.path), "--method=attention"]) == 0
    ((slide, file),) = list(next(iter(Maps.of(run))).arrays().items())[:1]
    attention = run.attention(test["path"][test["slide"] == slide].iloc[0])
    assert attention.weights.sum() == pytest.approx(1)
    np.testing.assert_allclose(on_grid(attention)[0], file.load(), rtol=1e-5)
    assert on_grid(attention)[1] == (0, 0, file.stride)
    with wt.Slide.open(attention.places.path) as opened:
        axes = opened.plot(attention=attention)
    _, drawn = axes.images
    rows, columns = file.load().shape
    assert drawn.get_extent() == [0, columns * file.stride, rows * file.stride, 0]
    assert axes.get_xlim() == (0, opened.shape[1])
    matplotlib.pyplot.close("all")
