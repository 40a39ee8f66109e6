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
from tests.wsi_trainer.forms import BAG, CONVERT, FROZEN, NAMES, SPLITS, TRAINED, UNSEEN, Forms, table
from tests.wsi_trainer.small import QUICK, VGG, regions
from wsi_trainer.cli import main
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.explain.maps import LabelFile
from wsi_trainer.fit.result import Result, Work
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json, write_json
from wsi_trainer.metrics import Interval, read_predictions, summarise
from wsi_trainer.report.render import titled
from wsi_trainer.slide.names import slide_name
from wsi_trainer.view.contents import contents_of

ATTENTION = ["--model.head=abmil", "--model.head.hidden=4"]
MODELS = {
    "image": [*VGG, "--model.backbone.norm=batch", *ATTENTION, *QUICK],  # evaluation mode is another network
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
SAME = (
    ("files", "without endings", "copies", "stores"), ("features, slides", "features", "features renamed"),
    ("features of others", "of others, slides", "of others, renamed"),
)  # fmt: skip
"""Forms in which a slide has the same pixels, or the same features, and so one prediction."""
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
        self.is_same = any({*row[1:]} <= {*kinds} for kinds in SAME)
        # No hash on one side, another name, and other features: only the patients tell.
        self.is_known = (
            self.is_same
            or slide_name(self.form.called("s07.tif")) == slide_name(self.cohort.called("s07.tif"))
            or (self.form.has_hashes and self.cohort.has_hashes)
        )
        self.is_coarse, self.is_coarser = row[1] == "coarse stores", row[2] == "coarse stores" != row[1]
        self.here, self.capsys = here, capsys
        self.run = Run(here / "run of Ü.1, whose name is longer than a line of a config and so is folded in it")
        drawn = forms.drawn if self.model == "regions" else None
        beside = self.form.table.parent
        self.manifest = table(beside / f"of {here.name}.csv", self.form.called, only="run", regions=drawn)
        self.others = table(self.cohort.table.parent / f"all {here.name}.csv", self.cohort.called, regions=drawn)
        self.forms = forms
        self.known: dict[str, str] = {}
        self.former: set[str] = set()
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

    def write(self, name: str, *words: str) -> str:
        """Give a command that writes a result, which is not written again unasked."""
        said = self.of_run(name, *words)
        assert "--overwrite" in self.of_run(name, *words, code=2)
        return said

    # What is done.

    def fit(self) -> None:
        words = [f"--out={self.run.path}", f"--data.manifest={self.manifest}", *self.form.words, *MODELS[self.model]]
        if self.model == "bag":
            words.append(f"--data.patches.mpp={1 if self.is_coarse else 0.5}")
        self.command("fit", *words)
        self.words = words

    def resume(self) -> None:
        """Training goes on: results of the weights before stay, and are named wherever they are shown."""
        best = self.run.checkpoint("best").read_bytes()
        said = self.command("fit", *self.words, "--train.epochs=2", "--resume=last")
        roots = [self.run.path / "checkpoint-last"]
        if best != self.run.checkpoint("best").read_bytes():
            roots += [self.run.path, *(self.run.path / "cohorts").glob("*")]
        made = {one.last for root in roots for one in Result.found(root)} - {self.run.evaluation("test")}
        self.former = {path.relative_to(self.run.path).as_posix() for path in made}
        assert all(name in said for name in self.former), (said, self.done)

    def test(self) -> None:
        self.of_run("test", code=2)  # it was tested, and is not written again unasked
        said = self.of_run("test", "--overwrite")
        self.check_figures(self.run, said)

    def validate(self) -> None:
        self.write("validate")
        self.check_figures(self.run, split="val")

    def test_killed(self) -> None:
        """A process that dies after a slide: its result stays, and the same command goes on with the next slide."""
        file, done, add = self.run.predictions_file("test"), [], Work.add
        before = file.read_bytes()

        def dies(work: Work, record: SlideRecord, entry: Any) -> Any:
            add(work, record, entry)
            raise KeyboardInterrupt

        def counted(work: Work, record: SlideRecord, entry: Any) -> Any:
            done.append(record.slide)
            return add(work, record, entry)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Work, "add", dies)
            self.of_run("test", "--overwrite", code=130)
            assert file.read_bytes() == before
            patch.setattr(Work, "add", counted)
            self.of_run("test")
        assert done == [rows(file)[1]["slide"]] and file.read_bytes() == before

    def test_of_last_checkpoint(self) -> None:
        said = self.write("test", "--checkpoint=last")
        self.check_figures(Run.open(self.run.path, "last"), said)

    def cohort_with_labels(self) -> None:
        words = [f"--cohort={self.others}", "--name=labelled 1", *self.cohort.words]
        if self.is_coarser:
            assert "finer" in self.of_run("test", *words, code=2)
            return
        said = self.write("test", *words)
        if self.is_known:
            assert "4 slides were in the split train" in said and "2 slides were in the split val" in said, said
        else:
            assert "6 patients are called like patients that the run was trained on" in said, said
        cohort = Run.open(self.run.path, cohort="labelled 1")
        self.check_figures(cohort, said)
        self.check_numbers({row["slide"]: row for row in rows(cohort.predictions_file("test"))})

    def cohort_without_labels(self) -> None:
        words = [str(self.others), "--name=unlabelled", *self.cohort.words]
        if self.is_coarser:
            assert "finer" in self.of_run("predict", *words, code=2)
            return
        self.write("predict", *words)
        said = {row["slide"]: row for row in rows(self.run.path / "cohorts" / "unlabelled" / "predictions.csv")}
        assert list(said) == [self.cohort.called(name) for name in NAMES]
        self.check_numbers(said)

    def one_slide(self) -> None:
        if self.model == "features":
            return
        record = next(record for record in self.run.kept() if record.split == "test")
        self.write("predict", str(record.path), "--name=one")
        (said,) = rows(self.run.path / "cohorts" / "one" / "predictions.csv")
        self.same(said, next(row for row in rows(self.run.predictions_file("test")) if row["slide"] == record.slide))

    def heatmap(self, split: str) -> None:
        if self.model in ("regions", "features"):
            self.of_run("heatmap", f"--split={split}", code=2)
            return
        self.write("heatmap", f"--split={split}", "--method=attention", "--train.budget=64MiB")
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
            self.write("segment", f"--split={split}")
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
        maps = [set(read_json(file)["slides"]) for file in self.run.path.glob("heatmaps/**/heatmaps.json")]
        for one in shown:
            slide = contents[one["name"]]
            shown_maps = [one for one in slide.maps if not isinstance(one, LabelFile)]
            assert len(shown_maps) == sum(slide.name in own for own in maps), (slide.name, self.done)
            file = self.run.predictions_file(slide.split)
            (own,) = (row for row in rows(file) if row["slide"] == slide.name)
            (opinion,) = one["opinions"]
            if "label" in own:
                assert opinion["probability"] == float(own[f"probability_{opinion['predicted']}"]) >= 0.5
                assert opinion["wrong"] == (opinion["predicted"] != own["label"])

    def notebook(self) -> None:
        """The figures as Python has them, with a model that was opened anew and of a folder that is only read."""
        run = wt.Run.open(self.run.path)
        slides, said = run.slides, run.predictions("test")
        assert slides["split"].value_counts().to_dict() == {"train": 4, "val": 2, "test": 2}
        assert set(said["slide"]) == set(slides[slides["split"] == "test"]["slide"])
        score = next(iter(run.scores["test"]["slide"].values()))
        assert str(Interval.of(score)) in repr(run) and html.escape(str(Interval.of(score))) in run._repr_html_()
        numbers = [name for name in said if name.startswith("probability")]
        assert numbers or self.model == "regions"
        found = run.predict(slides[slides["split"] == "test"])
        assert found[numbers].to_numpy().tolist() == said[numbers].to_numpy().tolist()

    def stores_beside_the_files(self) -> None:
        """Slides that were converted after a run was trained on their files: the run goes on reading the files."""
        if self.model == "features" or self.form.stores is not None or not self.form.records()[0].path.exists():
            return
        self.command("preprocess", str(self.form.table), str(self.here / "stores"), *CONVERT)
        # A manifest may name the stores by their own table, or the folder may be given.
        cohort = self.here / "stores" / "stores.csv"
        said = self.write("predict", str(cohort), "--name=from stores", "--data.stores=null")
        assert "finer" not in said
        found = {row["slide"]: row for row in rows(self.run.path / "cohorts/from stores/predictions.csv")}
        own = {row["slide"]: row for row in rows(self.run.predictions_file("test"))}
        for record, split in zip(self.form.records(), SPLITS):
            if split == "test":
                # Layers add up bytes of a store, which lie plane by plane, in another order than those of a TIFF.
                self.same(found[slide_name(record.path)], own[record.slide], to_the_bit=False)

    STEPS = (
        resume, test, test_killed, test_of_last_checkpoint, validate, cohort_with_labels, cohort_without_labels,
        one_slide, heatmap_of_test, heatmap_of_val, segment, report, view, notebook, stores_beside_the_files,
    )  # fmt: skip
    MAY_CHANGE: ClassVar[dict[str, tuple[str, ...]]] = {
        "fit": ("",),
        "resume": ("checkpoints/", "metrics/", "predictions/test", "evaluation/test", "tensorboard/", "config.yaml",
                   "memory.json", "plan.json", "estimate.json", "environment.json", "run.json"),
        "report": ("report.html", "cohorts/labelled 1/report.html"),
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
        assert scored == (UNSEEN if self.is_known else UNSEEN | TRAINED), self.done

    def check_figures(self, run: Run, said: str = "", split: str = "test") -> None:
        """The scores in the file, in what a command said, in Python, and of the numbers and labels in the table."""
        scores = read_json(run.evaluation(split))
        table = rows(run.predictions_file(split))
        assert not run.result("test", split).journal.exists()
        called = (self.form if run.cohort is None else self.cohort).called
        facts = {called(name): (str(number % 2), f"patient {number}") for number, name in enumerate(NAMES)}
        for row in table:
            label, patient = facts[row["slide"]]
            assert row["patient"] == patient and row.get("label", label) == label
        assert scores["slides"] == len(table)
        for name, score in scores["slide"].items():
            if said:
                assert f"{name} {Interval.of(score)}" in said, (name, said)
        assert Run.open(run.path, run.chosen, run.cohort).scores[split]["slide"] == scores["slide"]
        if self.model != "regions":
            found = {label: [float(row["probability_1"]) for row in table if row["label"] == label] for label in "01"}
            pairs = [float(one > none) + 0.5 * (one == none) for one in found["1"] for none in found["0"]]
            assert scores["slide"]["auc"]["value"] == pytest.approx(sum(pairs) / len(pairs))
        again = summarise(read_predictions(run.predictions_file(split)), dict(run.loaded.model.task.scores), 20, 0)
        write_json(self.here / "again.json", again)
        assert scores == scores | read_json(self.here / "again.json")

    def check_report(self, run: Run) -> None:
        page = html.unescape(run.report.read_text())
        plain = " ".join(re.sub(r"<[^>]+>", " ", page).split())
        for name, score in read_json(run.evaluation("test"))["slide"].items():
            assert f" {titled(name)} {Interval.of(score)} " in plain, (name, self.done)
        for row in rows(run.predictions_file("test")):
            shown = [row["slide"], row["patient"]]
            if "label" in row:
                predicted = max("01", key=lambda name: float(row[f"probability_{name}"]))
                shown += [row["label"], predicted, f"{float(row[f'probability_{predicted}']):.3f}"]
            assert f" {' '.join(shown)} " in plain, self.done
        former = {one.last.relative_to(run.path).as_posix() for one in Result.found(run.results)} & self.former
        assert ("from before training went on" in plain) == bool(former) and all(name in plain for name in former)
        for file in run.results.glob("heatmaps/**/heatmaps.json"):
            for slide in {one.slide for one in run.kept() if one.split == "test"} & {*read_json(file)["slides"]}:
                assert f'alt="{file.parent.name} of {slide}"' in page, (slide, self.done)

    def check_numbers(self, said: dict[str, dict[str, str]]) -> None:
        """A slide has one prediction in all forms that have the same pixels, or the same features."""
        known = {row["slide"]: row for row in rows(self.run.predictions_file("test"))}
        for name, split in zip(NAMES, SPLITS):
            if split == "test" and self.is_same:
                # Layers add up bytes of a store, which lie plane by plane, in another order than those of a TIFF.
                exact = self.form.stores == self.cohort.stores
                self.same(said[self.cohort.called(name)], known[self.form.called(name)], exact)

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
        for step in (Use.fit, *steps, Use.report, Use.view):
            use.do(step)
    except Exception as error:
        error.add_note(f"{SEED}={seed}: model {row[0]}, run on {row[1]}, cohort of {row[2]}, after {use.done}")
        raise


def seed() -> int:
    """The one in the environment, or a fresh one."""
    return int(os.environ.get(SEED, secrets.randbits(32)))


def test_a_row_of_the_table(forms: Forms, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = seed()
    go_through(random.Random(number).choice(TABLE), number, forms, tmp_path / "use", capsys)


@pytest.mark.full
@pytest.mark.parametrize("row", TABLE, ids=", ".join)
def test_the_whole_table(
    row: tuple[str, str, str], forms: Forms, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_through(row, seed(), forms, tmp_path / "use", capsys)
