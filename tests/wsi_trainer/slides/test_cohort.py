"""The tables of a folder of stores, replacing stores, and copies: what a tester found, row by row."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wsi_trainer.cli import main
from wsi_trainer.slides import cohort, staging
from wsi_trainer.slides.convert import Job, convert
from wsi_trainer.slides.errors import SlideError
from wsi_trainer.slides.export import export_ngff04, is_current
from wsi_trainer.slides.settings import Settings
from wsi_trainer.slides.store.manifest import find_damage, read_manifest
from wsi_trainer.synthetic import SlideSpec, write_slide
from wsi_trainer.tables import read_table

SMALL = Settings(chunk=64, shard=256, tissue="none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two slides of 300 px."""
    path = tmp_path / "slides"
    path.mkdir()
    for seed, name in enumerate(("a", "b")):
        write_slide(path / f"{name}.tif", SlideSpec(300, 300, seed=seed, tissue=0.3))
    return path


def preprocess(*words: object) -> int:
    return main(["preprocess", *map(str, words), "--workers", "1", "--stall_minutes", "0", "--tissue", "none"])


def rows(out: Path, name: str = "manifest.csv") -> list[dict[str, str]]:
    return [row for _, row in read_table(out / name).rows]


# -- what the user wrote (S7)


def test_labels_that_were_written_into_the_manifest_stay(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert preprocess(folder, out) == 0
    path = out / "manifest.csv"
    path.write_text('slide,label,mpp,note\r\na.zarr,1,0.5,"mine, and"\r\nb.zarr,0,0.25,\r\n')
    written = path.read_bytes()
    assert preprocess(folder, out) == 0
    assert path.read_bytes() == written  # to the byte: nothing was to be added
    write_slide(folder / "c.tif", SlideSpec(300, 300, seed=3, tissue=0.3))
    assert preprocess(folder / "c.tif", out) == 0
    assert rows(out) == [
        {"slide": "a.zarr", "label": "1", "mpp": "0.5", "note": "mine, and"},
        {"slide": "b.zarr", "label": "0", "mpp": "0.25", "note": ""},
        {"slide": "c.zarr", "label": "", "mpp": "0.5", "note": ""},
    ]
    shutil.rmtree(out / "b.zarr")
    assert main(["verify", str(out)]) == 1  # also of a slide of an earlier run


def test_a_list_that_says_otherwise_is_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, given = tmp_path / "out", tmp_path / "list.csv"
    given.write_text("slide,label,path\nslides/a.tif,1,\nslides/b.tif,,\n")
    assert preprocess(given, out) == 0
    assert list(rows(out)[0]) == ["slide", "label", "mpp"]
    given.write_text("slide,label,site\nslides/a.tif,2,X\nslides/b.tif,0,Y\n")
    capsys.readouterr()
    assert preprocess(given, out) == 0
    assert [(row["label"], row["site"]) for row in rows(out)] == [("1", "X"), ("0", "Y")]
    assert "keeps label '1' of a.zarr; the list says '2'" in capsys.readouterr().out


@pytest.mark.parametrize("text", ['slide,label\n"a.zarr,1\n', "name,label\na.zarr,1\n", "slide,label\nx.svs,1\n"])
def test_a_manifest_that_cannot_be_completed_is_refused_before_any_work(
    text: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "manifest.csv").write_text(text)
    assert preprocess(folder, out) == 2
    assert "manifest.csv" in capsys.readouterr().err
    assert (out / "manifest.csv").read_text() == text
    assert [path.name for path in out.iterdir()] == ["manifest.csv"]


def test_the_list_itself_is_not_where_results_go(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = folder / "manifest.csv"
    given.write_text("slide,label\na.tif,1\nb.tif,0\n")
    assert preprocess(given, folder) == 2
    assert "give another folder for the results" in capsys.readouterr().err
    assert given.read_text() == "slide,label\na.tif,1\nb.tif,0\n"


def test_parts_of_a_job_array_give_one_order(folder: Path, tmp_path: Path) -> None:
    for name in "cdef":
        shutil.copy(folder / "a.tif", folder / f"{name}.tif")
    for parts in (("1/3", "2/3", "3/3"), ("3/3", "1/3", "2/3")):
        out = tmp_path / parts[0].replace("/", "-")
        for part in parts:
            assert preprocess(folder, out, "--shard", part) == 0
        assert [row["slide"] for row in rows(out)] == [f"{name}.zarr" for name in "abcdef"]
        assert [row["name"] for row in rows(out, "summary.csv")] == list("abcdef")


def test_a_store_of_a_run_that_died_is_listed_by_the_next_whatever_it_is_about(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(Job(folder / "a.tif", "a"), out, SMALL)  # as far as a run that is killed before it writes tables
    assert [mark.name for mark in staging.due(out)] == ["a"]
    assert preprocess(folder / "b.tif", out) == 0
    assert sorted(row["slide"] for row in rows(out)) == ["a.zarr", "b.zarr"]
    assert staging.due(out) == []


def test_a_store_that_is_replaced_while_tables_are_written_is_told_of_by_the_next_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert(Job(folder / "a.tif", "a"), out, SMALL)

    def replaced(*arguments: Any) -> Any:
        """Another run's store takes the place of the one whose row was just read; its own tables have to wait."""
        monkeypatch.undo()
        found = cohort.table_bytes(*arguments)
        convert(Job(folder / "a.tif", "a"), out, replace(SMALL, mpp=1.0), overwrite=True)
        return found

    monkeypatch.setattr(cohort, "table_bytes", replaced)
    cohort.update_tables(out, [])
    (mark,) = staging.due(out)
    assert mark.seal == staging.seal_of(out / "a.zarr")
    cohort.update_tables(out, [])
    assert rows(out)[0]["mpp"] == "1.0" and staging.due(out) == []


def test_the_mark_of_a_store_that_never_came_goes_when_nobody_works_on_it(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(Job(folder / "a.tif", "a"), out, SMALL)
    staging.note_due(out, "a", "0" * 16)
    staging.note_due(out, "b", "1" * 16)
    with staging.lock(out, "a"):
        cohort.update_tables(out, [])
        assert [mark.seal for mark in staging.due(out)] == ["0" * 16]
    cohort.update_tables(out, [])
    assert staging.due(out) == []


def test_the_size_of_a_pixel_follows_a_store_that_is_made_anew(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert preprocess(folder, out) == 0
    assert preprocess(folder / "a.tif", out, "--mpp", "1.0", "--overwrite", "true") == 0
    assert [row["mpp"] for row in rows(out)] == ["1.0", "0.5"]
    assert [row["mpp"] for row in rows(out, "summary.csv")] == ["1.0", "0.5"]


# -- nothing is deleted before what replaces it is there (S9)


def test_a_source_is_never_replaced_by_its_result(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert preprocess(folder, out) == 0
    before = {path: path.read_bytes() for path in out.rglob("*.zarr/**/*") if path.is_file()}
    given = tmp_path / "list.csv"
    given.write_text("slide\nout/a.zarr\n")
    for words in ([given, out], [given, out, "--mpp", "1.0"]):
        assert preprocess(*words, "--overwrite", "true") == 1
        with pytest.raises(SlideError, match="replaced by its own result"):
            convert(Job(out / "a.zarr", "a"), out, SMALL, overwrite=True)
    assert {path: path.read_bytes() for path in before} == before


def test_settings_that_are_refused_leave_the_store(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert preprocess(folder, out) == 0
    assert preprocess(folder, out, "--mpp", "0.1", "--overwrite", "true") == 1
    assert [list(find_damage(out / f"{name}.zarr")) for name in ("a", "b")] == [[], []]
    assert main(["verify", str(out)]) == 0


class _Killed(BaseException):
    pass


def test_killed_at_every_rename_while_a_store_is_replaced(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is always the old store or the new one, and a run about another slide brings back what was aside."""
    rename, step, seen = os.replace, 0, set()
    while True:
        step += 1
        out = tmp_path / str(step)
        assert preprocess(folder / "a.tif", out) == 0
        calls = 0

        def counted(*arguments: str, at: int = step) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise _Killed
            rename(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", counted)
            try:
                preprocess(folder / "a.tif", out, "--mpp", "1.0", "--overwrite", "true")
                break
            except _Killed:
                seen.add((out / "a.zarr").exists())
        assert preprocess(folder / "b.tif", out) == 0
        facts = read_manifest(out / "a.zarr")["settings"]["facts"]
        assert main(["verify", str(out)]) == 0
        assert {row["slide"]: float(row["mpp"]) for row in rows(out)} == {"a.zarr": facts["mpp"], "b.zarr": 0.5}
    assert seen == {True, False} and step > 5


def test_a_store_that_is_a_link_is_replaced_and_what_it_leads_to_stays(folder: Path, tmp_path: Path) -> None:
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    convert(Job(folder / "a.tif", "a"), elsewhere, SMALL)
    out.mkdir()
    (out / "a.zarr").symlink_to(elsewhere / "a.zarr")
    convert(Job(folder / "a.tif", "a"), out, replace(SMALL, mpp=1.0), overwrite=True)
    assert not (out / "a.zarr").is_symlink()
    assert list(find_damage(elsewhere / "a.zarr")) == []


def test_a_damaged_store_is_made_anew_with_overwrite(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert preprocess(folder, out) == 0
    (out / "a.zarr" / "manifest.json").write_text("[]")
    assert preprocess(folder, out) == 1
    assert preprocess(folder, out, "--overwrite", "true") == 0
    assert main(["verify", str(out)]) == 0


# -- copies follow their stores (S10)


def test_a_copy_follows_its_store(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    copy = out / "ngff-0.4" / "a.zarr"
    assert preprocess(folder, out, "--export_ngff", "0.4") == 0
    assert is_current(out / "a.zarr", copy)
    assert preprocess(folder / "a.tif", out, "--mpp", "1.0", "--overwrite", "true") == 0
    assert is_current(out / "a.zarr", copy)
    assert not export_ngff04(out / "a.zarr", copy)
    (copy / ".zattrs").write_text("{}")  # as copies of earlier versions, which do not say of what they are
    assert export_ngff04(out / "a.zarr", copy)


# -- disks (minor rows)


@pytest.mark.parametrize("name", ["manifest.csv", "summary.csv", "failures.csv"])
def test_a_full_disk_at_the_end_is_one_line_and_leaves_no_half_file(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, rename = tmp_path / "out", os.replace

    def full(source: Path, target: Path) -> None:
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(source))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert preprocess(folder, out) == 2
    error = capsys.readouterr().err
    assert f"{out / name} cannot be written: No space left on device; what is converted is safe" in error
    assert ".part" not in error and not list(out.rglob("*.part"))
    assert preprocess(folder, out) == 0
    assert main(["verify", str(out)]) == 0
    assert len(rows(out)) == len(rows(out, "summary.csv")) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{slides}", ""], "an argument is empty"),
        (["{slides}", "{out}", "--workers", "0"], "--workers 0: expected 1 or more"),
        (["{slides}", "{out}", "--levels", "100"], "--levels 100"),
        (
            ["{slides}", "{out}", "--mpp", "10000"],
            "--mpp 10000: expected micrometres per pixel, above 0 and below",
        ),
        (["{slides}", "{out}", "--mpp", ""], "--mpp is empty"),
    ],
)
def test_options_are_refused_for_their_true_reason(
    words: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"slides": folder, "out": tmp_path / "out"}
    assert main(["preprocess", *(word.format(**places) for word in words)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x.geojson", "x.ome.geojson"])
def test_the_outline_of_an_ome_tiff_has_the_name_of_the_slide(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "a.tif", tmp_path / "x.ome.tif")
    ring = [[10, 10], [200, 10], [200, 200], [10, 200], [10, 10]]
    outline = {"type": "Polygon", "coordinates": [ring]}
    features = [{"type": "Feature", "properties": {}, "geometry": outline}]
    (tmp_path / name).write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    done = convert(Job(tmp_path / "x.ome.tif", "x", 0.5), tmp_path / "out", replace(SMALL, tissue="geojson"))
    assert done.tissue is not None and 0.2 < done.tissue < 0.8
