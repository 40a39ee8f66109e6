"""The table of use: slides in every form, and all that a user does with them, in any order.

After each command three things hold. No slide that was trained or chosen on is scored as new. No result of an earlier
command is lost or changed. Each figure is the same in each place that shows it: the file, the terminal, the report, the
viewer and a notebook.
"""

from __future__ import annotations

import csv
import hashlib
import html
import json
import os
import random
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import wsi_trainer as wt
from tests.wsi_trainer.forms import BAG, CONVERT, FROZEN, NAMES, SPLITS, TRAINED, UNSEEN, Form, Forms, table
from tests.wsi_trainer.small import QUICK, VGG, regions
from wsi_trainer.cli import main
from wsi_trainer.explain.maps import Maps
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json
from wsi_trainer.metrics import Interval
from wsi_trainer.slide.names import slide_name
from wsi_trainer.view.contents import contents_of

ATTENTION = ["--model.head=abmil", "--model.head.hidden=4"]
MODELS = {
    "image": [*VGG, *ATTENTION, *QUICK],
    "bag": [*BAG, *ATTENTION, *QUICK],
    "regions": [*regions(), "--train.monitor=val_loss"],
    "features": [*FROZEN, *ATTENTION, *QUICK],
}
OF_SLIDES = ("files", "without endings", "copies", "stores", "coarse stores")
OF_FEATURES = (
    "features, slides", "features", "features renamed", "features of others", "of others, slides", "of others, renamed",
)  # fmt: skip
TABLE = [
    *((model, run, cohort) for model in ("image", "bag", "regions") for run in OF_SLIDES for cohort in OF_SLIDES),
    *(("features", run, cohort) for run in OF_FEATURES for cohort in OF_FEATURES),
]
"""Model, form of the run's slides, form of the cohort's."""
SAMPLED = 4
"""Rows of the table that a test goes through without --full, half of them with a seed that is always the same."""
#: Files that a command may always write: they tell of a run, and nothing of slides is known from them alone.
NOTES = ("log.txt", "status.json", ".lock", "options.json")
SEED = "TABLE_OF_USE_SEED"


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(tmp_path_factory.mktemp("use"))


class Use:
    """A user with a run on slides of one form, and a cohort of another."""

    def __init__(self, forms: Forms, row: tuple[str, str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model, self.form, self.cohort = row[0], forms[row[1]], forms[row[2]]
        self.is_coarse, self.is_coarser = row[1] == "coarse stores", row[2] == "coarse stores" != row[1]
        self.here, self.capsys = here, capsys
        self.run = Run(here / "run of Ü.1, whose name is longer than a line of a config and so is folded in it")
        drawn = forms.drawn if self.model == "regions" else None
        beside = self.form.table.parent
        self.manifest = table(beside / f"of {here.name}.csv", self.form.called, only="run", regions=drawn)
        self.others = table(self.cohort.table.parent / f"all {here.name}.csv", self.cohort.called, regions=drawn)
        self.forms = forms
        self.known: dict[str, str] = {}
        self.done: list[str] = []

    def command(self, *words: str, code: int = 0) -> str:
        """Give a command; what it said, in one line."""
        self.capsys.readouterr()
        found = main([words[0], *words[1:]])
        said = self.capsys.readouterr()
        assert found == code, (words, said.err or said.out, self.done)
        return " ".join((said.out if code == 0 else said.err).split())

    def of_run(self, name: str, *words: str, code: int = 0) -> str:
        return self.command(name, str(self.run.path), *words, code=code)

    # What is done.

    def fit(self) -> None:
        words = [f"--out={self.run.path}", f"--data.manifest={self.manifest}", *self.form.words, *MODELS[self.model]]
        if self.model == "bag":
            words.append(f"--data.patches.mpp={1 if self.is_coarse else 0.5}")
        self.command("fit", *words)
        self.words = words

    def resume(self) -> None:
        self.command("fit", *self.words, "--train.epochs=2", "--resume=last")

    def test(self) -> None:
        self.of_run("test", code=2)  # it was tested, and is not written again unasked
        said = self.of_run("test", "--overwrite")
        self.check_figures(self.run, said)

    def validate(self) -> None:
        self.of_run("validate", "--overwrite")
        self.check_figures(self.run, split="val")

    def cohort_with_labels(self) -> None:
        words = [f"--cohort={self.others}", "--name=labelled 1", *self.cohort.words, "--overwrite"]
        if self.is_coarser:
            assert "finer" in self.of_run("test", *words, code=2)
            return
        said = self.of_run("test", *words)
        assert "4 slides were in the split train" in said and "2 slides were in the split val" in said, said
        self.check_figures(Run.open(self.run.path, cohort="labelled 1"), said)

    def cohort_without_labels(self) -> None:
        words = [str(self.others), "--name=unlabelled", *self.cohort.words, "--overwrite"]
        if self.is_coarser:
            assert "finer" in self.of_run("predict", *words, code=2)
            return
        self.of_run("predict", *words)
        said = {row["slide"]: row for row in rows(self.run.path / "cohorts" / "unlabelled" / "predictions.csv")}
        assert list(said) == [self.cohort.called(name) for name in NAMES]
        self.check_numbers(self.cohort, said)

    def one_slide(self) -> None:
        if self.model == "features":
            return
        record = next(record for record in self.run.kept() if record.split == "test")
        self.of_run("predict", str(record.path), "--name=one", "--overwrite")
        (said,) = rows(self.run.path / "cohorts" / "one" / "predictions.csv")
        self.same(said, next(row for row in rows(self.run.predictions_file("test")) if row["slide"] == record.slide))

    def heatmap(self, split: str) -> None:
        if self.model in ("regions", "features"):
            self.of_run("heatmap", f"--split={split}", code=2)
            return
        self.of_run("heatmap", f"--split={split}", "--method=attention", "--train.budget=64MiB", "--overwrite")
        folder = self.run.maps("attention", split)
        facts = read_json(folder / "heatmaps.json")
        assert set(facts["slides"]) == {record.slide for record in self.run.kept() if record.split == split}

    def heatmap_of_test(self) -> None:
        self.heatmap("test")

    def heatmap_of_val(self) -> None:
        self.heatmap("val")

    def segment(self) -> None:
        if self.model != "regions":
            assert "segment is for" in self.of_run("segment", code=2)
            return
        for split in ("test", "val"):
            self.of_run("segment", f"--split={split}", "--overwrite")
            found = read_json(self.run.result("segment", split).file)["slides"]
            assert set(found) == {record.slide for record in self.run.kept() if record.split == split}

    def report(self) -> None:
        self.of_run("report")
        self.check_report(self.run)
        if self.run.of_cohort("labelled 1").evaluation("test").is_file():
            self.of_run("report", "--name=labelled 1")
            self.check_report(Run.open(self.run.path, cohort="labelled 1"))

    def view(self) -> None:
        if self.model == "features" and not all(record.path.exists() for record in self.run.kept()):
            return
        shutil.rmtree(self.here / "page", ignore_errors=True)
        self.of_run("view", f"--static={self.here / 'page'}")
        text = (self.here / "page" / "contents.js").read_text()
        shown = json.loads(text.removeprefix("window.wsiStatic = ").removesuffix(";\n"))["slides"]
        predicted = {"test"} | ({"val"} if self.run.predictions_file("val").is_file() else set())
        assert {one["name"] for one in shown} == {one.slide for one in self.run.kept() if one.split in predicted}
        contents = {slide.name: slide for slide in contents_of(self.run.path).slides}
        maps = [maps.slides for maps in Maps.of(self.run)]
        for one in shown:
            slide = contents[one["name"]]
            assert len(slide.maps) == sum(slide.name in own for own in maps), (slide.name, self.done)
            file = self.run.predictions_file(slide.split)
            (own,) = (row for row in rows(file) if row["slide"] == slide.name)
            (opinion,) = one["opinions"]
            if "label" in own:
                assert opinion["probability"] == float(own[f"probability_{opinion['predicted']}"])

    def notebook(self) -> None:
        """The figures as Python has them, with a model that was opened anew and of a folder that is only read."""
        run = wt.Run.open(self.run.path)
        slides, said = run.slides, run.predictions("test")
        assert slides["split"].value_counts().to_dict() == {"train": 4, "val": 2, "test": 2}
        assert set(said["slide"]) == set(slides[slides["split"] == "test"]["slide"])
        score = next(iter(run.scores["test"]["slide"].values()))
        assert str(Interval.of(score)) in repr(run) and html.escape(str(Interval.of(score))) in run._repr_html_()
        if self.model != "features":
            own = slides[slides["split"] == "test"]
            numbers = [name for name in said if name.startswith("probability")]
            found = run.predict(own)
            assert found[numbers].to_numpy().tolist() == said[numbers].to_numpy().tolist()

    def stores_beside_the_files(self) -> None:
        """Slides that were converted after a run was trained on their files: the run goes on reading the files."""
        if self.model == "features" or self.form.stores is not None or not self.form.records()[0].path.exists():
            return
        self.command("preprocess", str(self.form.table), str(self.here / "stores"), *CONVERT)
        # A manifest may name the stores by their own table, or the folder may be given.
        cohort = self.here / "stores" / "stores.csv"
        said = self.of_run("predict", str(cohort), "--name=from stores", "--data.stores=null", "--overwrite")
        assert "finer" not in said
        found = {row["slide"]: row for row in rows(self.run.path / "cohorts/from stores/predictions.csv")}
        own = {row["slide"]: row for row in rows(self.run.predictions_file("test"))}
        for name, split in zip(NAMES, SPLITS):
            if split == "test":
                # Layers add up bytes of a store, which lie plane by plane, in another order than those of a TIFF.
                self.same(found[slide_name(name)], own[self.form.called(name)], to_the_bit=False)

    STEPS = (
        resume, test, validate, cohort_with_labels, cohort_without_labels, one_slide, heatmap_of_test, heatmap_of_val,
        segment, report, view, notebook, stores_beside_the_files,
    )  # fmt: skip
    MAY_CHANGE: ClassVar[dict[str, tuple[str, ...]]] = {
        "fit": ("",),
        "resume": ("checkpoints/", "metrics/", "predictions/test", "evaluation/test", "tensorboard/", "config.yaml",
                   "memory.json", "plan.json", "estimate.json", "environment.json", "run.json"),
        "report": ("report.html", "cohorts/labelled 1/report.html"),
        "cohort_with_labels": ("cohorts/labelled 1/",),
    }  # fmt: skip
    """Files of the run that a step may change; any other file, once written, stays as it is. Results of commands that
    are given again with `--overwrite` are equal to the bit."""

    def do(self, step: Callable[[Use], None]) -> None:
        """Do a step, and look at what it has done to the results of all earlier ones."""
        step(self)
        self.done.append(step.__name__)
        now = hashes(self.run.path)
        may = self.MAY_CHANGE.get(step.__name__, ())
        changed = {
            name for name, one in self.known.items() if now.get(name) != one and not name.startswith(may or ("\0",))
        }
        assert not changed, (changed, self.done)
        self.known = now
        for cohort in self.run.cohorts:
            self.check_unseen(Run(self.run.path, cohort=cohort))

    # What holds.

    def check_unseen(self, cohort: Run) -> None:
        """No slide that was trained or chosen on has a score in a cohort."""
        if not cohort.predictions_file("test").is_file():
            return
        own = {self.cohort.called(name): slide_name(name) for name in NAMES}
        scored = {own[row["slide"]] for row in rows(cohort.predictions_file("test"))}
        assert scored == UNSEEN and not scored & TRAINED, self.done

    def check_figures(self, run: Run, said: str = "", split: str = "test") -> None:
        """The scores in the file, in what a command said, and in Python."""
        scores = read_json(run.evaluation(split))
        assert scores["slides"] == len(rows(run.predictions_file(split)))
        for name, score in scores["slide"].items():
            if said:
                assert f"{name} {Interval.of(score)}" in said, (name, said)
        assert Run.open(run.path, cohort=run.cohort).scores[split]["slide"] == scores["slide"]

    def check_report(self, run: Run) -> None:
        page = html.unescape(run.report.read_text())
        plain = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
        for score in read_json(run.evaluation("test"))["slide"].values():
            if score["value"] is not None:
                assert f"{score['value']:z.3f}" in plain, self.done
        for row in rows(run.predictions_file("test")):
            assert row["slide"] in plain, self.done
        for maps in Maps.of(run):
            own = {record.slide for record in run.kept() if record.split == "test"} & maps.slides
            for slide in own:
                assert f'alt="{maps.folder.name} of {slide}"' in page, (slide, self.done)

    def check_numbers(self, form: Form, said: dict[str, dict[str, str]]) -> None:
        """A slide has one prediction in all forms that have the same pixels, or the same features."""
        same = {"files", "without endings", "copies", "stores"}
        forms = {self.forms[kind].table: kind for kind in same if self.model != "features"}
        exact = form.table in forms and self.form.table in forms and form.stores is None and self.form.stores is None
        known = {row["slide"]: row for row in rows(self.run.predictions_file("test"))}
        for name, split in zip(NAMES, SPLITS):
            if split == "test" and exact:
                self.same(said[form.called(name)], known[self.form.called(name)])

    @staticmethod
    def same(one: dict[str, str], two: dict[str, str], to_the_bit: bool = True) -> None:
        """The numbers of two predictions; `test` writes the pixels of classes, `predict` their shares."""
        numbers = [name for name in one if name not in ("slide", "patient", "site")]
        if any(name.startswith("share_") for name in numbers):
            pixels = {name: float(two[name.replace("share_", "predicted_")]) for name in numbers}
            two = {name: str(pixels[name] / sum(pixels.values())) for name in numbers}
            to_the_bit = False
        if to_the_bit:
            assert [one[name] for name in numbers] == [two[name] for name in numbers], (one, two)
        for name in numbers:
            assert float(one[name]) == pytest.approx(float(two[name]), abs=1e-6), (one, two)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def hashes(folder: Path) -> dict[str, str]:
    """The files of a run by their contents, without those that every command may write."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in NOTES
    }


def go_through(row: tuple[str, str, str], seed: int, forms: Forms, here: Path, capsys: Any) -> None:
    """Train in one form, and do everything in an order by chance."""
    here.mkdir()
    use = Use(forms, row, here, capsys)
    steps = list(Use.STEPS)
    random.Random(seed).shuffle(steps)
    try:
        for step in (Use.fit, *steps):
            use.do(step)
    except Exception as error:
        error.add_note(f"{SEED}={seed}: model {row[0]}, run on {row[1]}, cohort of {row[2]}, after {use.done}")
        raise


def seeds() -> list[int]:
    """One that is always the same, and a fresh one; or the one in the environment."""
    return [int(os.environ[SEED])] if SEED in os.environ else [0, secrets.randbits(32)]


def test_a_sample_of_the_table(forms: Forms, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in seeds():
        for number, row in enumerate(random.Random(seed).sample(TABLE, SAMPLED // 2)):
            go_through(row, seed, forms, tmp_path / f"{seed} {number}", capsys)


@pytest.mark.full
@pytest.mark.parametrize("row", TABLE, ids=", ".join)
def test_the_whole_table(
    row: tuple[str, str, str], forms: Forms, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_through(row, seeds()[-1], forms, tmp_path / "use", capsys)
