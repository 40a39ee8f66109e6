"""Results of a run in use: none is lost, one that was killed goes on, and later commands ask nothing again."""

from __future__ import annotations

import ast
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wsi_trainer
from tests.stopping import go_on, started, stopped
from tests.wsi_trainer.small import QUICK, VGG, regions
from wsi_trainer.cli import main
from wsi_trainer.data.manifest import SlideRecord, read_manifest
from wsi_trainer.fit.result import Result, Work
from wsi_trainer.fit.run import Run
from wsi_trainer.io.files import read_json
from wsi_trainer.metrics import read_predictions
from wsi_trainer.preprocess.command import preprocess
from wsi_trainer.synthetic import generate

SPLITS = {"train": 0.4, "val": 0.3, "test": 0.3}
LOGS = ("log.txt", "status.json")


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a run but those that say how it went."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in LOGS and not p.name.endswith(".lock"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cohorts of slides, and a run of each kind of model: classes of slides, and regions."""
    folder = tmp_path_factory.mktemp("results")
    own = generate(folder / "own", slides=7, seed=1, splits=SPLITS, workers=1, shape=(192, 192))
    generate(folder / "other", slides=3, seed=9, splits=SPLITS, workers=1, shape=(192, 192))
    for name, words in (("classes", [*VGG, *QUICK, "--train.epochs=2"]), ("regions", regions())):
        more = [f"--out={folder / name}", f"--data.manifest={own}", "--train.loggers=[csv]"]
        assert main(["fit", *words, *more]) == 0
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    """A copy of the runs; the slides stay where they are."""
    for name in ("classes", "regions"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


@pytest.mark.slow
def test_results_of_two_splits_cohorts_checkpoints_and_methods_lie_side_by_side(made: Path, here: Path) -> None:
    other, classes, drawn = str(made / "other" / "manifest.csv"), str(here / "classes"), str(here / "regions")
    heatmap = ["heatmap", classes, "--top=0", "--tiles=0", "--ngff=0.5"]
    commands = [
        ["validate", classes],
        ["test", classes, f"--cohort={other}", "--name=tested"],
        ["predict", classes, other, "--name=predicted"],
        heatmap, [*heatmap, "--split=val"], [*heatmap, "--method=gradient"], [*heatmap, "--target=0"],
        [*heatmap, "--name=tested"],
        ["segment", drawn], ["segment", drawn, "--split=val"],
        ["segment", drawn, f"--slides={other}", "--name=new"],
    ]  # fmt: skip
    of_last = [["test", classes], commands[2], heatmap, ["segment", drawn]]
    commands += [[*words, "--checkpoint=last"] for words in of_last]
    places: dict[Path, str] = {}
    for words in commands:
        before = {name: contents(here / name) for name in ("classes", "regions")}
        assert main(words) == 0, words
        for name, files in before.items():
            after = contents(here / name)
            lists = {file for file in files if file.endswith(("/splits.csv", "/run.json"))}
            lost = [file for file in files if file not in lists and after.get(file) != files[file]]
            assert not lost, (words, lost)
        found = {one.about for name in before for one in every_result(here / name)}
        (new,) = found - set(places)
        places[new] = " ".join(words)
        of = read_json(new)
        assert of["checkpoint"]["name"] == ("last" if "--checkpoint=last" in words else "best")
        assert len(of["checkpoint"]["sha256"]) == 64 and of["versions"]["torch"]
        assert of["kind"] == {"validate": "test"}.get(words[0], words[0])
    before = {name: contents(here / name) for name in ("classes", "regions")}
    for words in commands[::4]:
        assert main(words) == 2, "a result that is whole is not replaced unasked"
        assert main([*words, "--overwrite"]) == 0, words
        assert before == {name: contents(here / name) for name in ("classes", "regions")}, words


def every_result(run: Path) -> list[Result]:
    """The results of a run and its cohorts by commands: those that say what they are of, but for those of `fit`."""
    folders = [run, *(run / "cohorts").glob("*")]
    roots = [root for folder in folders for root in (folder, *folder.glob("checkpoint-*"))]
    found = [one for root in roots for one in Result.found(root)]
    return [one for one in found if one.about != Result(run, "test").about]


@pytest.mark.slow
def test_reports_and_pages_are_of_the_checkpoint_that_is_asked_for(here: Path) -> None:
    run = here / "classes"
    assert main(["test", str(run), "--checkpoint=last"]) == 0
    assert main(["heatmap", str(run), "--checkpoint=last", "--top=0"]) == 0
    last = Run.open(run, "last")
    assert last.scores["test"]["checkpoint"] == "last" and Run.open(run).scores["test"]["checkpoint"] == "best"
    assert main(["report", str(run), "--checkpoint=last"]) == 0
    page = last.report.read_text()
    assert "activation" in page and not Run(run).report.exists()
    assert last.result("test").of["checkpoint"]["sha256"] in page, "the page says of which weights it is"
    assert main(["view", str(run), "--checkpoint=last", f"--static={here / 'page'}"]) == 0
    shutil.copyfile(last.checkpoint(), here / "epoch.ckpt")
    assert main(["test", str(run), f"--checkpoint={here / 'epoch.ckpt'}"]) == 0
    alone = Run.open(run, str(here / "epoch.ckpt"))
    assert alone.results.name.startswith("checkpoint-epoch-")
    assert alone.predictions_file("test").read_bytes() == last.predictions_file("test").read_bytes()


@pytest.mark.slow
def test_results_of_weights_before_training_went_on_are_named(
    made: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, said = here / "classes", "of weights from before training went on: "
    for words in (["heatmap", "--top=0"], ["validate"], ["test", "--checkpoint=last"], ["report"]):
        assert main([words[0], str(run), *words[1:]]) == 0
    assert said not in Run(run).report.read_text()
    words = [*VGG, *QUICK, f"--out={run}", f"--data.manifest={made / 'own' / 'manifest.csv'}", "--train.loggers=[csv]"]
    assert main(["fit", *words, "--train.epochs=3", "--resume=last"]) == 0
    assert f"{said}checkpoint-last/evaluation/test.json; give" in " ".join(capsys.readouterr().out.split())
    with Run(run).checkpoint("best").open("ab") as file:
        file.write(b"another")
    assert main(["test", str(run), "--overwrite"]) == 0
    said += "evaluation/val.json, heatmaps/activation/heatmaps.json; give"
    assert main(["report", str(run)]) == 0 and said[1:] in Run(run).report.read_text()
    capsys.readouterr()
    assert main(["view", str(run), f"--static={here / 'page'}"]) == 0
    assert said in " ".join(capsys.readouterr().out.split())


COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "test": lambda run, other: ["test", str(run / "classes"), "--overwrite"],
    "cohort": lambda run, other: ["test", str(run / "classes"), f"--cohort={other}", "--name=c"],
    "predict": lambda run, other: ["predict", str(run / "classes"), str(other), "--name=c"],
    "heatmap": lambda run, other: ["heatmap", str(run / "classes"), f"--regions={other.parent / 'lesions'}"],
    "segment": lambda run, other: ["segment", str(run / "regions")],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] if kind in ("cohort", "segment") else []) for kind in COMMANDS]
)
def test_a_command_that_was_killed_goes_on_and_leaves_the_same_files(
    kind: str, made: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed as it opens the journal for its second slide; the first is not done again."""
    other = made / ("own" if kind == "heatmap" else "other") / "manifest.csv"
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    for name in ("classes", "regions"):
        shutil.copytree(here / name, undisturbed / name)
    assert main(COMMANDS[kind](undisturbed, other)) == 0
    process = started(COMMANDS[kind](here, other), Path(".unfinished"), tmp_path / "log", 4, signal.SIGKILL)
    process.join()
    (journal,) = here.glob("*/**/*.unfinished")
    assert process.exitcode == -signal.SIGKILL
    lines = journal.read_text().splitlines()
    assert len(lines) == 2, "what it is of, and one slide"
    with journal.open("a") as file:
        file.write('["cut off in the midd')
    added: list[str] = []
    add = Work.add

    def counted(work: Work, record: SlideRecord, entry: Any) -> Any:
        added.append(record.slide)
        return add(work, record, entry)

    monkeypatch.setattr(Work, "add", counted)
    assert main(COMMANDS[kind](here, other)) == 0
    assert added and json.loads(lines[1])[0] not in added
    for name in ("classes", "regions"):
        expected = {f: c for f, c in contents(undisturbed / name).items() if not f.endswith("qupath.groovy")}
        assert {f: c for f, c in contents(here / name).items() if not f.endswith("qupath.groovy")} == expected
    assert not list(here.glob("*/**/*.unfinished"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_result_that_another_process_makes_is_refused_by_name(
    kind: str, made: Path, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first process stands in its first slide; also slides of another list are not taken under its name."""
    other = made / "other" / "manifest.csv"
    words = COMMANDS[kind](here, other)
    process = started(words, Path(".unfinished"), tmp_path / "log", 3, signal.SIGSTOP)
    assert stopped(process)
    (tmp_path / "fewer.csv").write_text(
        "".join(other.open().readlines()[:-1]).replace("slides/", f"{other.parent}/slides/")
    )
    fewer = [word.replace(str(other), str(tmp_path / "fewer.csv")) for word in words]
    for again in (words, fewer) if kind in ("cohort", "predict") else (words,):
        capsys.readouterr()
        assert main(again) == 2
        assert "is being made by another command" in capsys.readouterr().err
    assert go_on(process) == 0
    assert not list(here.glob("*/**/*.unfinished"))
    if kind in ("cohort", "predict"):
        assert len(Run.open(here / "classes", cohort="c").kept()) == 3
    assert main([*words, "--overwrite"]) == 0


def test_what_is_unfinished_is_not_mixed_with_something_else(
    made: Path, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, words = here / "classes", ["heatmap", str(here / "classes"), "--top=0"]
    process = started(words, Path(".unfinished"), tmp_path / "log", 4, signal.SIGKILL)
    process.join()
    (journal,) = run.glob("heatmaps/**/*.unfinished")
    capsys.readouterr()
    assert main([*words, "--threshold=0.7"]) == 2
    said = capsys.readouterr().err
    assert "left unfinished, with options.threshold 0.5 instead of 0.7" in said and "--overwrite" in said
    shutil.copyfile(Run(run).checkpoint("last"), Run(run).checkpoint("best"))
    with Run(run).checkpoint("best").open("ab") as file:
        file.write(b"another")
    assert main(words) == 2
    assert "checkpoint.sha256" in capsys.readouterr().err
    shutil.copyfile(made / "classes" / "checkpoints" / "best.ckpt", Run(run).checkpoint("best"))
    assert main([*words, "--train.budget=64MiB"]) == 0, "keys of speed may change"
    assert not journal.exists()
    assert main([*words, "--threshold=0.7", "--overwrite"]) == 0


@pytest.mark.slow
def test_how_a_cohort_is_read_is_not_asked_again(
    made: Path, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read from stores that the run's config does not name, from a folder that was current then."""
    other, run = made / "other" / "manifest.csv", here / "classes"
    stores = tmp_path / "here" / "stores"
    assert preprocess(str(other), stores, stall_minutes=0, workers=1) in (0, None)
    monkeypatch.chdir(stores.parent)
    assert main(["test", str(run), f"--cohort={other}", "--name=c", "--data.stores=stores", "--data.workers=0"]) == 0
    monkeypatch.chdir(here)
    cohort = Run.open(run, cohort="c")
    assert all(record.path.suffix == ".zarr" for record in cohort.kept())
    assert cohort.loaded.data.stores == stores
    assert main(["heatmap", str(run), "--name=c", "--top=0"]) == 0
    assert read_json(cohort.result("heatmap", method="activation").about)["overrides"]["data.stores"] == str(stores)
    first = read_predictions(cohort.predictions_file("test"))
    assert main(["test", str(run), "--name=c", "--overwrite"]) == 0
    again = read_predictions(cohort.predictions_file("test"))
    assert (again.probabilities == first.probabilities).all() and again.slides == first.slides  # type: ignore[attr-defined]
    assert set(cohort.identities()) == set(first.slides)
    assert main(["predict", str(run), str(other), "--name=c"]) == 0
    assert read_json(cohort.result("predict").about)["overrides"]["data.stores"] == str(stores)
    assert main(["test", str(run), f"--cohort={other}", "--name=c", "--overwrite"]) == 0
    assert read_json(cohort.result("test").about)["overrides"]["data.stores"] == str(stores)
    # The slides have moved: it is said once.
    shutil.move(stores, tmp_path / "there")
    assert main(["heatmap", str(run), "--name=c", "--method=gradient", "--top=0"]) == 2
    assert "--data-root" in capsys.readouterr().err
    assert main(["heatmap", str(run), "--name=c", "--method=gradient", f"--data-root={tmp_path / 'there'}"]) == 0
    for words in (["test", "--overwrite"], ["report"], ["view", f"--static={tmp_path / 'page'}"]):
        assert main([words[0], str(run), "--name=c", *words[1:]]) == 0
    assert all(record.path.is_relative_to(tmp_path / "there") for record in Run.open(run, cohort="c").kept())


def test_a_cohort_with_results_keeps_its_slides(
    made: Path, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = str(here / "classes"), made / "other" / "manifest.csv"
    assert main(["test", run, f"--cohort={other}", "--name=c"]) == 0
    assert main(["heatmap", run, "--name=c", "--top=0"]) == 0
    before = contents(here / "classes")
    records = read_manifest(other)
    lines = ["slide,path,label,patient"]
    for record, path in zip(records, [one.path for one in records[1:]] + [records[0].path]):
        lines.append(f"{record.slide},{path},{record.label},{record.patient}")
    (tmp_path / "swapped.csv").write_text("\n".join(lines) + "\n")
    for words in (
        ["test", run, f"--cohort={tmp_path / 'swapped.csv'}"],
        ["predict", run, str(tmp_path / "swapped.csv")],
    ):
        capsys.readouterr()
        assert main([*words, "--name=c", "--overwrite"]) == 2
        assert "the cohort c has other slides, and results on them" in capsys.readouterr().err
    assert contents(here / "classes") == before


OWNERS = {
    "fit/result.py": {
        "evaluation", "predictions", "heatmaps", "segments", "heatmaps.json", "segments.json", "scores.json",
        "lesions.csv", "predictions.csv", "result.json",
    },
    "fit/folder.py": {"cohorts", "options.json"},
    "fit/study.py": {"study.json", "cross_validation.json", "comparison.json"},
    "data/cohort.py": {"splits.csv", "run.json"},
}  # fmt: skip
"""The file of the package that names each place of results."""


@pytest.mark.slow
def test_one_file_says_where_a_result_lies() -> None:
    package = Path(wsi_trainer.__file__).parent
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in set().union(*OWNERS.values()):
                found.setdefault(path.relative_to(package).as_posix(), set()).add(node.value)
    assert found == OWNERS


def test_a_study_names_no_folder_outside_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = {"schema": 1, "kind": "folds", "folders": ["../other"], "names": ["other"], "split": "test"}
    (tmp_path / "study.json").write_text(json.dumps(about))
    for command in ("report", "status", "view", "test"):
        assert main([command, str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert "study.json is damaged" in said and "../other is no folder in it" in said
