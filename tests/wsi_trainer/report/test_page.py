"""The page: what it says, that it needs no other file, and that a browser shows it without an error."""

import re
from collections.abc import Callable, Mapping
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from wsi_trainer.cli import main
from wsi_trainer.data.manifest import SlideRecord, write_manifest
from wsi_trainer.environment import environment
from wsi_trainer.fit.folder import read_curves
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.study import Study
from wsi_trainer.io.files import write_json
from wsi_trainer.metrics import (
    MULTI_LABEL_SCORES,
    RISK_SCORES,
    SCORES,
    VALUE_SCORES,
    ClassPredictions,
    Interval,
    MultiLabelPredictions,
    Predictions,
    RiskPredictions,
    Score,
    ValuePredictions,
    Words,
    summarise,
)
from wsi_trainer.report import write_report
from wsi_trainer.report.contents import RunResults, difference, slide_rows

from .conftest import SLIDES, Browser, MakeRun


@pytest.fixture
def runs(make_run: MakeRun, labels: np.ndarray) -> tuple[Run, Run]:
    """A good model with one bad mistake, slide 5, and one that guesses."""
    good = np.where(labels == 1, 0.9, 0.1) + np.linspace(-0.05, 0.05, SLIDES)
    good[5] = 0.02
    return make_run("full", good), make_run("guess", np.random.default_rng(0).random(SLIDES))


def test_the_worst_mistake_comes_first(runs: tuple[Run, Run]) -> None:
    rows = slide_rows(RunResults.load("full", runs[0], "test"), RunResults.load("guess", runs[1], "test"))
    assert rows[0].slide.startswith("slide 5 ") and rows[0].words.wrong and rows[0].error == pytest.approx(0.98)
    assert rows[0].words.predicted == "normal" and rows[0].words.probability == pytest.approx(0.98)
    assert [row.error for row in rows] == sorted((row.error for row in rows), reverse=True)
    assert sum(row.words.wrong for row in rows) == 1 and all(row.baseline is not None for row in rows)


def test_the_page_needs_nothing_but_itself(runs: tuple[Run, Run]) -> None:
    page = write_report(runs[0], runs[1]).read_text(encoding="utf-8")
    addresses = re.findall(r"""(?:src|href|url|@import)\s*[=(]?\s*["']?([^"'\s>)]+)""", page)
    assert len(addresses) > SLIDES
    assert all(address.startswith("data:") for address in addresses if not address.startswith("="))
    assert "http:" not in page.replace("http://www.w3.org", "") and "https:" not in page


def test_a_comparison_has_one_interval_of_each_difference(runs: tuple[Run, Run], tmp_path: Path) -> None:
    names = ("full", "guess")
    study = Study(tmp_path, "comparison", names, names, "test")
    found = study.compare(SCORES, 20, 7)
    interval = Interval.of(found["scores"]["auc"]["difference"])
    assert interval.bounds != difference(*(RunResults.load(one.name, one, "test") for one in runs), None).bounds
    study.write()
    write_json(study.results, {**found, "lines": {}})
    assert main(["report", str(tmp_path), f"--out={tmp_path / 'page.html'}"]) == 0
    page = unescape((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert f"{interval.counted()}; the interval excludes 0" in page


@pytest.mark.slow
def test_the_page_says_the_numbers_and_what_is_absent(runs: tuple[Run, Run]) -> None:
    page = unescape(write_report(runs[0], runs[1], facts={"time": "12 s"}).read_text(encoding="utf-8"))
    assert "What is not there yet" in page and "This run used plain PyTorch" in page
    assert "the interval excludes 0" in page and "Brier score" in page and "24 slides of 24 patients" in page
    assert "1.0 MiB" in page and "320 × 256 (width × height)" in page and "12 s" in page
    assert "slide 5 <&>.tif" in page and "train: {epochs: 2}" in page


@pytest.mark.slow
def test_a_browser_shows_it_without_an_error(runs: tuple[Run, Run], browser: Browser, tmp_path: Path) -> None:
    page = write_report(runs[0], runs[1])
    screenshot = tmp_path / "page.png"
    _, logged = browser(page, "--window-size=1200,3000", f"--screenshot={screenshot}")
    assert logged == ""
    pixels = np.asarray(Image.open(screenshot).convert("RGB"))
    assert pixels.shape == (3000, 1200, 3)
    dark = (pixels.max(axis=2) < 120).mean(axis=1) > 0
    assert dark.mean() > 0.2, "the page is nearly empty"


@pytest.mark.slow
def test_the_script_sorts_and_filters(runs: tuple[Run, Run], browser: Browser, tmp_path: Path) -> None:
    page = write_report(runs[0], runs[1]).read_text(encoding="utf-8")
    actions = """<script>
    document.getElementById("wrong").checked = true;
    document.getElementById("wrong").dispatchEvent(new Event("input"));
    document.title = document.getElementById("count").textContent;
    heads[6].click();
    document.title += "; first " + body.rows[0].cells[6].textContent;
    </script></body>"""
    played = tmp_path / "played.html"
    played.write_text(page.replace("</body>", actions), encoding="utf-8")
    document, logged = browser(played, "--dump-dom")
    title = re.search("<title>(.*?)</title>", document)
    assert logged == "" and title is not None
    assert title[1].startswith(f"1 of {SLIDES} slides; first 0.0")


@pytest.mark.slow
def test_the_command_writes_it_and_names_what_is_missing(
    runs: tuple[Run, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "page.html"
    assert main(["report", str(runs[0].path), f"--baseline={runs[1].path}", f"--out={out}"]) == 0
    assert out.is_file() and str(out) in capsys.readouterr().out
    assert "by DeLong: " in out.read_text()
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    runs[0].predictions_file("test").unlink()
    assert main(["report", str(runs[0].path)]) == 2
    assert "wsi-train test" in capsys.readouterr().err


def test_a_resumed_run_has_one_curve(tmp_path: Path) -> None:
    for version, lines in enumerate(("0,1,0.9\n1,2,0.8\n", "1,2,0.7\n2,3,0.6\n")):
        path = tmp_path / f"version_{version}" / "metrics.csv"
        path.parent.mkdir()
        path.write_text("epoch,step,val_loss\n" + lines)
    assert read_curves(tmp_path)["val_loss"] == [0.9, 0.7, 0.6]
    assert read_curves(tmp_path / "absent") == {}


# -- every kind of prediction has a page that a browser shows without an error


COUNT = 12
NAMES = tuple(f"slide {i}.tif" for i in range(COUNT))
PATIENTS = tuple(f"p{i // 2}" for i in range(COUNT))
SITES = tuple("AB"[i // 6] for i in range(COUNT))
RANDOM = np.random.default_rng(0)


def several() -> ClassPredictions:
    said = RANDOM.dirichlet([1, 1, 1], COUNT)
    return ClassPredictions(NAMES, PATIENTS, ("a", "b", "c"), np.arange(COUNT) // 2 % 3, said, SITES)


def multi_label() -> MultiLabelPredictions:
    labels = np.stack([np.arange(COUNT) % 2, np.arange(COUNT) // 2 % 2], axis=1).astype(float)
    labels[0, 1] = np.nan
    return MultiLabelPredictions(NAMES, PATIENTS, ("mutated", "high"), labels, RANDOM.random((COUNT, 2)), SITES)


def values() -> ValuePredictions:
    targets = np.linspace(0, 5, COUNT)
    return ValuePredictions(NAMES, PATIENTS, targets, targets + RANDOM.normal(size=COUNT), SITES)


def risks() -> RiskPredictions:
    times = np.arange(1.0, COUNT + 1).repeat(1)
    return RiskPredictions(NAMES, NAMES, times, np.arange(COUNT) % 3 > 0, -times + RANDOM.normal(size=COUNT), SITES)


KINDS: dict[str, tuple[Callable[[], Predictions], Mapping[str, Score], tuple[str, ...]]] = {
    "several": (several, SCORES, ("Confusion", "Results by class", "Results by site")),
    "multi_label": (multi_label, MULTI_LABEL_SCORES, ("Precision and recall", "Results by class")),
    "values": (values, VALUE_SCORES, ("Predicted against true", "Results by site", "distance of the predicted")),
    "risks": (risks, RISK_SCORES, ("Survival by predicted risk", "no event until", "C index")),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_page(kind: str, tmp_path: Path, browser: Browser) -> None:
    make, scores, expected = KINDS[kind]
    predictions = make()
    folder = Run(tmp_path)
    predictions.write(folder.predictions_file("test"))
    summary = summarise(predictions, dict(scores), 40)
    write_json(folder.evaluation("test"), {"split": "test", **summary})
    write_json(folder.environment, environment())
    write_json(folder.memory, {"engine": "plain PyTorch"})
    tifffile.imwrite(tmp_path / "slide.tif", np.full((64, 64, 3), 200, np.uint8), tile=(64, 64), photometric="rgb")
    write_manifest(folder.splits, [SlideRecord(n, tmp_path / "slide.tif", "", "p", "test") for n in NAMES])
    folder.config.write_text("train: {epochs: 2}\n")
    page = write_report(folder)
    text = unescape(page.read_text(encoding="utf-8"))
    for words_ in expected:
        assert words_ in text
    document, logged = browser(page, "--dump-dom")
    assert logged == "" and f"{COUNT} of {COUNT} slides" in document


def test_errors_are_those_counted_by_hand() -> None:
    two = RiskPredictions(("x", "y"), ("x", "y"), np.array([1.0, 2.0]), np.array([True, False]), np.array([0.0, 1.0]))
    assert two.errors().tolist() == [1.0, 1.0]
    one = MultiLabelPredictions(("x",), ("x",), ("a", "b"), np.array([[1.0, np.nan]]), np.array([[0.25, 0.9]]))
    assert one.errors().tolist() == [0.75]
    assert one.words(0) == Words("a", "b", wrong=True)


@pytest.mark.slow
def test_the_page_says_that_a_training_was_an_approximation(make_run: MakeRun) -> None:
    folder = make_run("split", np.linspace(0, 1, SLIDES))
    assert "an approximation" not in write_report(folder).read_text(encoding="utf-8")
    write_json(folder.memory, {"engine": "SFTStrategy, tile by tile", "approximation": "splits 2 along each axis"})
    page = write_report(folder).read_text(encoding="utf-8")
    assert "training was an approximation" in page and "splits 2 along each axis" in page
