"""One slide in every form: whatever a run was trained on, its slides are known again in a cohort of any form.

Forms of slides: their files, byte copies under other names, stores, stores of another resolution. Forms of features:
those of `embed` and those of another program, with slides and without, under the same names and under others. Names are
those of TCGA and CLAM, and names with spaces, umlauts and dots.
"""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path

import pytest

from tests.wsi_trainer.forms import FROZEN, NAMES, SPLITS, UNSEEN, Form, Forms, table, write_table
from tests.wsi_trainer.small import QUICK, VGG, rows
from wsi_trainer.cli import main
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.errors import UserError
from wsi_trainer.fit.run import Run
from wsi_trainer.metrics import read_predictions
from wsi_trainer.slide.identity import hash_of_1_0
from wsi_trainer.slide.names import file_about, same_patient, slide_name
from wsi_trainer.store import manifest as store_manifest
from wsi_trainer.synthetic import SlideSpec, write_slide


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    """All forms of the slides."""
    return Forms(tmp_path_factory.mktemp("identity"))


@pytest.fixture(scope="module")
def runs(forms: Forms, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run on the first eight slides in each form that can be trained on."""
    made = {}
    for name in ("files", "stores", "coarse stores", "features, slides", "features", "features of others"):
        form, folder = forms[name], tmp_path_factory.mktemp("run")
        manifest = table(form.table.with_name(f"of {folder.name}.csv"), form.called, only="run")
        kind = VGG if form.features is None else FROZEN
        assert main(["fit", f"--out={folder / 'run'}", f"--data.manifest={manifest}", *form.words, *kind, *QUICK]) == 0
        made[name] = folder / "run"
    return made


SLIDES = ("files", "without endings", "copies", "stores", "coarse stores")
FEATURES = ("features, slides", "features", "features renamed", "features of others", "of others, slides")
TABLE = [
    *((run, cohort) for run in ("files", "stores", "coarse stores") for cohort in (*SLIDES, *FEATURES)),
    *((run, cohort) for run in ("features, slides", "features") for cohort in (*SLIDES, *FEATURES)),
    *(("features of others", cohort) for cohort in ("files", "features", "features of others", "of others, renamed")),
]
SAMPLE = [
    ("files", "stores"), ("files", "coarse stores"), ("features of others", "of others, slides"),
    pytest.param("stores", "copies", marks=pytest.mark.full),
    pytest.param("coarse stores", "without endings", marks=pytest.mark.full),
    pytest.param("features, slides", "features renamed", marks=pytest.mark.full),
]  # fmt: skip


@pytest.mark.parametrize(("run", "cohort"), TABLE)
def test_slides_that_a_run_was_trained_on_are_known_again(
    run: str, cohort: str, runs: dict[str, Path], forms: Forms
) -> None:
    form = forms[cohort]
    assert form.names(Run(runs[run]).unseen(form.records(), form.features)) == UNSEEN


@pytest.mark.parametrize(("run", "cohort"), SAMPLE)
def test_no_slide_that_was_trained_on_is_scored(
    run: str, cohort: str, runs: dict[str, Path], forms: Forms, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The same through the command line, with the pages that show it."""
    form, folder = forms[cohort], shutil.copytree(runs[run], tmp_path / "run")
    code = main(["test", str(folder), f"--cohort={form.table}", "--name=c", *form.words])
    said = capsys.readouterr()
    if (run, cohort) == ("files", "coarse stores"):  # coarser than what it was trained on, but for those left out
        assert code == 2 and "which is finer" in said.err and "x.v2" not in said.err
        return
    assert code == 0 and "4 slides were in the split train of the run" in " ".join(said.out.split())
    scored = read_predictions(Run.open(folder, cohort="c").predictions_file("test"))
    assert {slide_name(name) for name in NAMES if form.called(name) in scored.slides} == UNSEEN
    assert main(["predict", str(folder), str(form.table), "--name=p", *form.words]) == 0
    assert len(rows(folder / "cohorts" / "p" / "predictions.csv")) == len(NAMES)
    assert main(["report", str(folder)]) == main(["report", str(folder), "--name=c"]) == 0
    gone = "have no picture, since their files are not there" in Run.open(folder, cohort="c").report.read_text()
    assert gone == (not all(record.path.exists() for record in form.records()))


def in_form_of_1_0(store: Path, slide: Path) -> None:
    """A store as 1.0 wrote it: it knows the hash of all bytes, and one that has the name of the file in it."""
    path = store / "zarr.json"
    content = json.loads(path.read_text())
    del content["attributes"]["wsi_trainer"]["source"]["hash"]
    path.write_text(json.dumps(content))
    settings = store_manifest.read_manifest(store)["settings"]
    settings["header"]["source"] = hash_of_1_0(slide)
    store_manifest.write_manifest(store, settings, {})


def run_of_1_0(run: Path, folder: Path) -> Run:
    """A run with the checksums that 1.0 kept."""
    shutil.copytree(run, folder)
    facts = json.loads((folder / "run.json").read_text())
    of_stores = any(record.path.suffix == ".zarr" for record in Run(folder).kept())
    facts["slides"] = {
        name: {"content": one["content"], "source": one["sha256"] if of_stores else one["hash"]}
        for name, one in facts["slides"].items()
    }
    (folder / "run.json").write_text(json.dumps({**facts, "schema": 1}))
    return Run(folder)


def test_runs_and_stores_of_1_0_are_compared_by_all_bytes(runs: dict[str, Path], forms: Forms, tmp_path: Path) -> None:
    stores = shutil.copytree(forms["stores"].stores, tmp_path / "stores")
    for record in forms["stores"].records():
        in_form_of_1_0(stores / record.path.name, forms["files"].table.parent / record.slide)
    assert main(["verify", str(stores)]) == 0
    old = Form(forms["files"].table, stores)
    for number, (run, form) in enumerate([
        (run_of_1_0(runs["stores"], tmp_path / "r1"), forms["copies"]),
        (run_of_1_0(runs["stores"], tmp_path / "r2"), forms["coarse stores"]),
        (run_of_1_0(runs["stores"], tmp_path / "r3"), old),
        (run_of_1_0(runs["files"], tmp_path / "r4"), forms["copies"]),
        (run_of_1_0(runs["files"], tmp_path / "r5"), old),
        (run_of_1_0(runs["features, slides"], tmp_path / "r6"), forms["features"]),
        (Run(runs["files"]), old),
        (Run(runs["stores"]), old),
    ]):  # fmt: skip
        assert form.names(run.unseen(form.records(), form.features)) == UNSEEN, number
    words = ["--tissue=none", "--workers=1", "--stall-minutes=0"]
    before = (stores / "x.v2.zarr" / "manifest.json").stat().st_mtime_ns
    assert main(["preprocess", str(old.table), str(stores), *words]) == 0
    assert (stores / "x.v2.zarr" / "manifest.json").stat().st_mtime_ns == before, "nothing was left to do"


def test_a_slide_of_another_content_under_the_same_name_is_another_slide(
    runs: dict[str, Path], forms: Forms, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hashes decide where they can be compared: the slides of two hospitals may be called alike."""
    for number, name in enumerate(NAMES):
        write_slide(tmp_path / name, SlideSpec(100, 96, seed=9, slide=number, patient=number, positive=True))
    manifest = table(tmp_path / "other.csv", str)
    for run in ("files", "stores", "features, slides"):
        assert len(Run(runs[run]).unseen(read_manifest(manifest))) == len(NAMES)
    form = forms["features of others"]
    capsys.readouterr()
    assert len(Run(runs["files"]).unseen(read_manifest(forms["features of others"].table), form.features)) == 4
    assert "by their names, since there is no file on both sides" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("form", ["files", "features of others"])
def test_what_a_run_or_its_cohort_reads_is_not_replaced(
    form: str, runs: dict[str, Path], forms: Forms, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = forms[form]
    where = shutil.copytree(mine.features or mine.table.parent, tmp_path / "data")
    (where / "cohort.csv").write_text(mine.table.read_text())
    words = [f"--data.features={where}"] if mine.features else []
    run = shutil.copytree(runs[form], tmp_path / "run")
    assert main(["test", str(run), f"--cohort={where / 'cohort.csv'}", "--name=c", *words]) == 0
    first, second = [file for name in ("Fall.10", "s10") for file in where.glob(f"{name}.*")]
    shutil.copyfile(first, second)
    # Of a cohort nothing but its table says which slides it has.
    records = Run.open(run, cohort="c")
    with pytest.raises(UserError, match=r"s10.* is not the one that the cohort c began with: its checksum"):
        records.records("test", features=where if mine.features else None)
    if mine.features:
        shutil.copyfile(second, where / "s07.h5")
        assert main(["test", str(run), "--overwrite", *words]) == 2
        assert "s07" in (said := capsys.readouterr().err) and "its checksum has changed" in said
        (where / "s07.h5").unlink()
        assert main(["test", str(run), "--overwrite", *words]) == 2
        assert "data.features has none of s07.h5, s07.pt" in capsys.readouterr().err


def test_one_file_of_features_in_two_splits_is_refused(
    forms: Forms, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form = forms["features of others"]
    folder = shutil.copytree(form.features, tmp_path / "features")
    shutil.copyfile(folder / "x.v2.h5", folder / "s07.h5")
    manifest = table(tmp_path / "m.csv", slide_name, only="run")
    words = [f"--data.manifest={manifest}", f"--data.features={folder}", *FROZEN, *QUICK]
    assert main(["fit", f"--out={tmp_path / 'run'}", *words]) == 2
    assert "x.v2 in val and s07 in test are one slide under two names" in capsys.readouterr().err


# Names.


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("in/TCGA-05-4244-01Z-00-DX1.d4ff32cd.svs", "TCGA-05-4244-01Z-00-DX1.d4ff32cd"),
        ("TCGA-05-4244-01Z-00-DX1.d4ff32cd", "TCGA-05-4244-01Z-00-DX1.d4ff32cd"),
        ("a.ome.tif", "a"), ("a.OME.TIFF", "a"), ("a.ome.zarr", "a"), ("a.zarr", "a"), ("a.tif.zarr", "a.tif"),
        ("1.2.840.113619", "1.2.840.113619"), ("case 3.v2", "case 3.v2"), (".tif", ".tif"), ("Müller.NDPI", "Müller"),
    ],
)  # fmt: skip
def test_only_endings_that_readers_know_are_taken_off(path: str, name: str) -> None:
    assert slide_name(path) == name == slide_name(name) or path == "a.tif.zarr"


def test_files_about_a_slide_are_found_by_its_cell_and_its_path(tmp_path: Path) -> None:
    for name in ("a.geojson", "b.ome.geojson", "c.v2.geojson", f"{unicodedata.normalize('NFD', 'Müller')}.geojson"):
        (tmp_path / name).touch()
    found = {
        slide: file_about(tmp_path, (slide, Path("stores") / path))
        for slide, path in (("a.svs", "a.zarr"), ("b.ome.tif", "b.zarr"), ("c.v2", "c.v2.svs"), ("7", "a.svs"),
                            ("Müller.tif", "Müller.zarr"), ("c", "c.svs"))
    }  # fmt: skip
    assert [one is not None and one[1].is_file() for one in found.values()] == [True] * 5 + [False]
    (tmp_path / "a.svs.geojson").touch()
    with pytest.raises(UserError, match=r"has a.geojson and a.svs.geojson; leave one of them there"):
        file_about(tmp_path, ("a.svs",))


def test_a_name_without_ending_finds_its_slide(forms: Forms, tmp_path: Path) -> None:
    slides = forms["files"].table.parent
    manifest = table(slides / "names.csv", slide_name)
    assert {record.path.name for record in read_manifest(manifest)} == set(NAMES)
    assert main(["preprocess", str(manifest), str(tmp_path / "out"), "--tissue=none", "--workers=1"]) == 0
    found = {path.name for path in (tmp_path / "out").glob("*.zarr")}
    assert found == {f"{slide_name(name)}.zarr" for name in NAMES}
    for name in ("y.svs", "y.tif", "z.tif", "z.png"):
        (tmp_path / name).touch()
    (tmp_path / "z.csv").write_text("slide\nz\nnowhere\n")
    assert [record.path.name for record in read_manifest(tmp_path / "z.csv", labelled=False)] == ["z.tif", "nowhere"]
    (tmp_path / "y.csv").write_text("slide\ny\n")
    with pytest.raises(UserError, match=r"y may be y.svs or y.tif; write its ending into the table"):
        read_manifest(tmp_path / "y.csv", labelled=False)


def test_drawn_regions_are_found_by_names_of_tcga(runs: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs["files"], tmp_path / "run")
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    ring = [[10, 10], [60, 10], [60, 60], [10, 60], [10, 10]]
    text = json.dumps({"type": "Polygon", "coordinates": [ring]})
    for name in NAMES:
        (drawn / f"{slide_name(name)}.geojson").write_text(text)
    assert main(["heatmap", str(run), "--split=train", f"--regions={drawn}", "--train.budget=64MiB"]) == 0
    facts = json.loads((Run(run).maps("activation", "train") / "heatmaps.json").read_text())
    assert len(facts["slides"]) == SPLITS.count("train")
    assert all("mass_inside" in entry for entry in facts["slides"].values())
    assert facts["slides"][NAMES[0]]["array"] == f"{slide_name(NAMES[0])}.npy"


# Patients.


def test_one_patient_in_two_spellings_is_refused_in_two_given_splits(
    forms: Forms, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = rows(table(tmp_path / "m.csv", str, only="run"))
    for line, patient in ((lines[0], "P3"), (lines[6], "p3")):
        line["patient"] = patient
    manifest = write_table(tmp_path / "m.csv", lines)
    words = [f"--data.manifest={manifest}", f"--data.root={forms['files'].table.parent}", *VGG, *QUICK]
    assert main(["fit", f"--out={tmp_path / 'run'}", *words]) == 2
    assert "patient P3 has slides in two splits" in capsys.readouterr().err


@pytest.mark.parametrize(("one", "two"), [("3", "3.0"), ("00003", "3"), ("P3", "p03"), ("Mu\u0308ller", "müller")])
def test_spellings_of_a_patient(one: str, two: str, tmp_path: Path) -> None:
    assert same_patient(one) == same_patient(two) != same_patient(f"{two}1")
    (tmp_path / "m.csv").write_text(f"slide,patient\na,{one}\nb,{two}\nA,\na1,\na01,\n")
    found = [record.patient for record in read_manifest(tmp_path / "m.csv", labelled=False)]
    assert found == [one, one, "A", "a1", "a01"], "a slide without a patient is one of its own"
