"""The tables of a folder of stores, replacing stores, and copies: what a tester found, row by row."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from wsi_trainer.cli import main
from wsi_trainer.data import manifest as data
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io import files
from wsi_trainer.io.tables import read_table
from wsi_trainer.preprocess import stores
from wsi_trainer.store.convert import Job, Settings, convert
from wsi_trainer.store.export import export_ngff04, is_current
from wsi_trainer.synthetic import SlideSpec, write_slide

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
    return main(["preprocess", *map(str, words), "--workers", "1", "--stall-minutes", "0", "--tissue", "none"])


def rows(out: Path, name: str = "stores.csv") -> list[dict[str, str]]:
    return [row for _, row in read_table(out / name).rows]


# -- the user's table is the user's


def test_a_template_is_written_once_and_is_the_users(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (folder / "bad.svs").write_bytes(b"nothing")
    assert preprocess(folder, out) == 1
    assert (out / "manifest.csv").read_text() == "slide,label,patient\na.zarr,,\nb.zarr,,\n"
    written = b'slide,label,mpp,note\r\na.zarr,1,0.5,"mine, and"\r\n'
    (out / "manifest.csv").write_bytes(written)
    write_slide(folder / "c.tif", SlideSpec(300, 300, seed=3, tissue=0.3))
    capsys.readouterr()
    for words in ([folder], [folder / "c.tif"], [folder, "--mpp", "1.0", "--overwrite", "true"]):
        assert preprocess(words[0], out, *words[1:]) == (0 if words[0] != folder else 1)
        assert (out / "manifest.csv").read_bytes() == written
    printed = " ".join(capsys.readouterr().out.split())
    assert "lacks lines for 2 of the slides: b, c" in printed
    assert [row["slide"] for row in rows(out)] == ["a", "b", "c"]
    shutil.rmtree(out / "b.zarr")
    assert main(["verify", str(out)]) == 1  # also of a slide of an earlier run


def test_a_users_table_in_the_folder_of_stores_is_no_hindrance(folder: Path) -> None:
    given = folder / "manifest.csv"
    given.write_text("slide,label\na.tif,1\nb.tif,0\n")
    for _ in range(2):
        assert preprocess(given, folder) == 0
    assert given.read_text() == "slide,label\na.tif,1\nb.tif,0\n"
    assert sorted(path.name for path in folder.glob("*.zarr")) == ["a.zarr", "b.zarr"]


def test_a_table_of_somebody_else_is_not_replaced(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "stores.csv").write_text("shop,street\nBakery,1\n")
    assert preprocess(folder, out) == 2
    assert "stores.csv is not a table of preprocess" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["stores.csv"]


def test_slides_that_were_renamed_are_named_and_are_in_the_cohort_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, given = tmp_path / "out", folder / "list.csv"
    given.write_text("slide,label\na.tif,1\nb.tif,0\n")
    assert preprocess(given, out) == 0
    for name in "ab":
        (folder / f"{name}.tif").rename(folder / f"case_{name}.tif")
    given.write_text("slide,label\ncase_a.tif,1\ncase_b.tif,0\n")
    capsys.readouterr()
    assert preprocess(given, out) == 0
    assert "a, case_a were made from the same file" in " ".join(capsys.readouterr().out.split())
    records = data.read_manifest(given, stores=out)
    assert [(one.slide, one.path) for one in records] == [
        ("case_a.tif", out / "case_a.zarr"),
        ("case_b.tif", out / "case_b.zarr"),
    ]


@pytest.mark.parametrize(
    ("slide", "found"),
    [
        ("a/x.svs", "a/x"), ("/data/b/x.tif", "b/x"), ("y.svs", "sub/y"), ("z.svs", "z.svs"), ("z.tif", "z.tif"),
        ("w.ome.tiff", "w"), ("w.zarr", "w"), ("sub/y", "sub/y"),
    ],
)  # fmt: skip
def test_a_slide_is_found_by_its_name(slide: str, found: str, tmp_path: Path) -> None:
    for name in ("a/x", "b/x", "sub/y", "z.svs", "z.tif", "w"):
        (tmp_path / f"{name}.zarr").mkdir(parents=True)
    path = tmp_path / "m.csv"
    path.write_text(f"slide,label\n{slide},1\n")
    (record,) = data.read_manifest(path, stores=tmp_path)
    assert record.path == tmp_path / f"{found}.zarr" and record.slide == slide


@pytest.mark.parametrize(
    ("slides", "message"),
    [
        (["x.svs"], "may be a/x or b/x"),
        (["a/x.svs", "none.svs"], "1 of 2 slides have no store in .*, the first is none.svs"),
        (["a/x.svs", "c/a/x.svs"], "slides a/x.svs and c/a/x.svs are one store"),
    ],
)
def test_a_slide_without_one_store_of_its_own_is_named(slides: list[str], message: str, tmp_path: Path) -> None:
    for name in ("a/x", "b/x"):
        (tmp_path / f"{name}.zarr").mkdir(parents=True)
    (tmp_path / "m.csv").write_text("slide,label\n" + "".join(f"{slide},1\n" for slide in slides))
    with pytest.raises(UserError, match=message):
        data.read_manifest(tmp_path / "m.csv", stores=tmp_path)


def test_parts_of_a_job_array_give_one_order(folder: Path, tmp_path: Path) -> None:
    for name in "cdef":
        shutil.copy(folder / "a.tif", folder / f"{name}.tif")
    for parts in (("1/3", "2/3", "3/3"), ("3/3", "1/3", "2/3")):
        out = tmp_path / parts[0].replace("/", "-")
        for part in parts:
            assert preprocess(folder, out, "--shard", part) == 0
        assert [row["slide"] for row in rows(out)] == list("abcdef")
        assert {path.name for path in out.glob("failures*")} == {f"failures-{n}-of-3.csv" for n in (1, 2, 3)}
        assert [row["slide"] for row in rows(out, "manifest.csv")] == [f"{name}.zarr" for name in "abcdef"]


def test_jobs_of_an_array_that_end_together_wait_for_each_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that holds the tables for longer than any other lock is waited for."""
    monkeypatch.setattr(files, "PATIENCE", 0.01)
    out = tmp_path / "out"
    assert preprocess(folder, out, "--shard", "1/2") == 0
    with files.lock(out / stores.TABLES):
        ending = Thread(target=stores.write_stores, args=(out,))
        ending.start()
        ending.join(0.3)
        assert ending.is_alive()
    ending.join()
    assert [row["slide"] for row in rows(out)] == ["a"]


def test_the_failures_of_a_job_are_kept_where_the_tables_stay_locked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stores, "PATIENCE", 0.01)
    out = tmp_path / "out"
    (folder / "c.tif").write_bytes(b"no slide")
    out.mkdir()
    with files.lock(out / stores.TABLES):
        assert preprocess(folder, out, "--shard", "1/1") == 2
        assert "another run is writing it; what is converted is safe" in capsys.readouterr().err
        assert [Path(row["slide"]).name for row in rows(out, "failures-1-of-1.csv")] == ["c.tif"]
        with pytest.raises(UserError, match="another run is writing it"):
            stores.unlisted(out, ["a"], template=True)


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


class _Killed(BaseException):
    pass


@pytest.mark.slow
def test_killed_at_every_rename_while_a_store_is_replaced(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command does the rest, whenever it was killed."""
    rename, step = os.replace, 0
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
                pass
        assert preprocess(folder / "b.tif", out) == 0
        assert preprocess(folder / "a.tif", out, "--mpp", "1.0", "--overwrite", "true") == 0
        assert main(["verify", str(out)]) == 0
        assert {row["slide"]: float(row["mpp"]) for row in rows(out)} == {"a": 1.0, "b": 0.5}
    assert step > 5


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
    assert preprocess(folder, out, "--export-ngff", "0.4") == 0
    assert is_current(out / "a.zarr", copy)
    assert preprocess(folder / "a.tif", out, "--mpp", "1.0", "--overwrite", "true") == 0
    assert is_current(out / "a.zarr", copy)
    assert not export_ngff04(out / "a.zarr", copy)
    (copy / ".zattrs").write_text("{}")  # as copies of earlier versions, which do not say of what they are
    assert export_ngff04(out / "a.zarr", copy)


def test_a_name_that_no_store_can_have_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "a.tif").rename(folder / f"{'a' * 250}.tif")
    out = tmp_path / "out"
    assert preprocess(folder, out) == 1
    (failure,) = rows(out, "failures.csv")
    assert failure["reason"] == "its name is longer than 200 bytes; rename it"
    assert [row["slide"] for row in rows(out)] == ["b"]


# -- disks (minor rows)


@pytest.mark.parametrize("name", ["manifest.csv", "stores.csv", "failures.csv"])
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
    assert len(rows(out)) == len(rows(out, "manifest.csv")) == 2


@pytest.mark.parametrize("name", ["x.geojson", "x.ome.geojson"])
def test_the_outline_of_an_ome_tiff_has_the_name_of_the_slide(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "a.tif", tmp_path / "x.ome.tif")
    ring = [[10, 10], [200, 10], [200, 200], [10, 200], [10, 10]]
    outline = {"type": "Polygon", "coordinates": [ring]}
    with pytest.raises(SlideError, match=r"x\.geojson does not exist"):
        convert(Job(tmp_path / "x.ome.tif", "x", 0.5), tmp_path / "out", replace(SMALL, tissue="geojson"))
    (tmp_path / name).write_text("[]")
    with pytest.raises(SlideError, match="holds no polygon"):
        convert(Job(tmp_path / "x.ome.tif", "x", 0.5), tmp_path / "out", replace(SMALL, tissue="geojson"))
    features = [{"type": "Feature", "properties": {}, "geometry": outline}]
    (tmp_path / name).write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    done = convert(Job(tmp_path / "x.ome.tif", "x", 0.5), tmp_path / "out", replace(SMALL, tissue="geojson"))
    assert done.tissue is not None and 0.2 < done.tissue < 0.8
