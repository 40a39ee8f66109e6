"""The page: what it says, that it needs no other file, and that a browser shows it without an error."""

import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wsi_trainer.cli import main
from wsi_trainer.errors import UserError
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import write_json
from wsi_trainer.report import write_report
from wsi_trainer.report.contents import RunResults, read_curves, slide_rows

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


def test_the_page_says_the_numbers_and_what_is_absent(runs: tuple[Run, Run]) -> None:
    page = unescape(write_report(runs[0], runs[1], facts={"time": "12 s"}).read_text(encoding="utf-8"))
    assert "What is not there yet" in page and "This run used plain PyTorch" in page
    assert "the interval excludes 0" in page and "Brier score" in page and "24 slides of 24 patients" in page
    assert "1.0 MiB" in page and "320 × 256 (width × height)" in page and "12 s" in page
    assert "slide 5 <&>.tif" in page and "train: {epochs: 2}" in page


def test_the_page_says_that_a_training_was_an_approximation(make_run: MakeRun) -> None:
    folder = make_run("split", np.linspace(0, 1, SLIDES))
    assert "an approximation" not in write_report(folder).read_text(encoding="utf-8")
    write_json(folder.memory, {"engine": "SFTStrategy, tile by tile", "approximation": "splits 2 along each axis"})
    page = write_report(folder).read_text(encoding="utf-8")
    assert "training was an approximation" in page and "splits 2 along each axis" in page


def test_names_cannot_break_the_page(runs: tuple[Run, Run]) -> None:
    assert "<&>" not in write_report(runs[0]).read_text(encoding="utf-8")


def test_a_browser_shows_it_without_an_error(runs: tuple[Run, Run], browser: Browser, tmp_path: Path) -> None:
    page = write_report(runs[0], runs[1])
    screenshot = tmp_path / "page.png"
    _, logged = browser(page, "--window-size=1200,3000", f"--screenshot={screenshot}")
    assert logged == ""
    pixels = np.asarray(Image.open(screenshot).convert("RGB"))
    assert pixels.shape == (3000, 1200, 3)
    dark = (pixels.max(axis=2) < 120).mean(axis=1) > 0
    assert dark.mean() > 0.2, "the page is nearly empty"


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


def test_the_browser_would_notice_an_error(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text("<script>absent();</script>")
    assert "absent is not defined" in browser(page, "--dump-dom")[1]


def test_the_command_writes_it_and_names_what_is_missing(
    runs: tuple[Run, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "page.html"
    assert main(["report", str(runs[0].path), f"--baseline={runs[1].path}", f"--out={out}"]) == 0
    assert out.is_file() and str(out) in capsys.readouterr().out
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    runs[0].predictions("test").unlink()
    assert main(["report", str(runs[0].path)]) == 2
    assert "wsi-train test" in capsys.readouterr().err


def test_more_than_two_classes_have_a_page_too(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("full", np.linspace(0.1, 0.9, SLIDES))
    for path in (folder.predictions("test"), folder.evaluation("test")):
        text = path.read_text()
        path.write_text(text.replace("probability_tumour", "probability_tumour,probability_other"))
    rows = folder.predictions("test").read_text().splitlines()
    folder.predictions("test").write_text("\n".join([rows[0], *(row + ",0.0" for row in rows[1:])]))
    page = write_report(folder).read_text(encoding="utf-8")
    assert (
        "Precision and recall, bands likewise" in page and "Confusion, full" in page and "full resolution" not in page
    )


def test_a_resumed_run_has_one_curve(tmp_path: Path) -> None:
    for version, lines in enumerate(("0,1,0.9\n1,2,0.8\n", "1,2,0.7\n2,3,0.6\n")):
        path = tmp_path / f"version_{version}" / "metrics.csv"
        path.parent.mkdir()
        path.write_text("epoch,step,val_loss\n" + lines)
    assert read_curves(tmp_path)["val_loss"] == [0.9, 0.7, 0.6]
    assert read_curves(tmp_path / "absent") == {}


def test_a_run_that_was_not_tested_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the folder of a run"):
        write_report(Run(tmp_path))
