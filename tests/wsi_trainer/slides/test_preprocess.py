"""Many slides at once, from the command line: failures are named and stop nobody."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.wsi_trainer.small import rows
from wsi_trainer.cli import main
from wsi_trainer.errors import UserError
from wsi_trainer.preprocess import pool
from wsi_trainer.preprocess.inputs import list_slides
from wsi_trainer.preprocess.pool import Failure
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.convert import Converted, Job, Settings, convert
from wsi_trainer.synthetic import generate

SMALL = Settings(chunk=64, shard=256)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("cohort"), slides=6, side=(300, 420), workers=2)


@pytest.mark.slow
def test_real_slides_are_converted_or_refused_with_the_reason(real_slides: Path, tmp_path: Path) -> None:
    assert main(["preprocess", str(real_slides), str(tmp_path), "--workers", "2"]) == 1
    reasons = {Path(row["slide"]).name: row["reason"] for row in rows(tmp_path / "failures.csv")}
    assert reasons.keys() == {
        "broken.svs",
        "tiled-three-levels-no-mpp.tif",
        "yb10kx5k.zstd.tiff",
        "XYC_JPEG.ome.tiff",
        "XYC_LZW.ome.tiff",
    }
    assert "not an image" in reasons["broken.svs"]
    assert "does not say how large a pixel is" in reasons["tiled-three-levels-no-mpp.tif"]
    assert "352.858" in reasons["yb10kx5k.zstd.tiff"]
    stores = [row["store"] for row in rows(tmp_path / "stores.csv")]
    assert sorted(stores) == [
        "CMU-1-Small-Region.zarr", "CMU-1-Small-Region_dicom.zarr", "test3-DAPI-2-(387).zarr",
    ]  # fmt: skip
    assert all((tmp_path / store / "manifest.json").exists() for store in stores)
    assert main(["verify", str(tmp_path)]) == 0


def test_the_stores_are_listed(cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preprocess", str(cohort), str(tmp_path), "--background", "constant", "--workers", "1"]) == 0
    assert f"Train with --data.manifest {cohort} --data.stores {tmp_path}" in capsys.readouterr().out.replace("\n", "")
    assert not (tmp_path / "manifest.csv").exists()  # the user has one
    listed = rows(tmp_path / "stores.csv")
    assert [row["slide"] for row in listed] == [Path(row["slide"]).stem for row in rows(cohort)]
    assert rows(tmp_path / "failures.csv") == []
    assert all(0.4 < float(row["tissue"]) <= 1 for row in listed)
    assert all(float(row["lost"]) < 0.05 for row in listed)


def test_rerun_converts_only_what_failed(cohort: Path, tmp_path: Path) -> None:
    folder = tmp_path / "slides"
    folder.mkdir()
    good = sorted((cohort.parent / "slides").iterdir())[:2]
    (folder / "a.tif").write_bytes(good[0].read_bytes())
    (folder / "b.tif").write_bytes(b"nothing")
    assert main(["preprocess", str(folder), str(tmp_path / "out"), "--workers", "1"]) == 1
    first = (tmp_path / "out" / "a.zarr" / "manifest.json").stat().st_mtime_ns
    (folder / "b.tif").write_bytes(good[1].read_bytes())
    assert main(["preprocess", str(folder), str(tmp_path / "out"), "--workers", "1"]) == 0
    assert (tmp_path / "out" / "a.zarr" / "manifest.json").stat().st_mtime_ns == first
    assert len(rows(tmp_path / "out" / "stores.csv")) == 2
    assert rows(tmp_path / "out" / "failures.csv") == []


def work(jobs: list[Job], out: Path, workers: int, **how: Any) -> dict[int, Converted | Failure]:
    report = how.pop("report", lambda number, share: None)
    return dict(
        pool.work_on_all(partial(convert, out=out, settings=SMALL), jobs, workers=workers, report=report, **how)
    )


@pytest.mark.slow
def test_several_processes_give_what_one_gives(cohort: Path, tmp_path: Path) -> None:
    jobs = [item.job for item in list_slides(str(cohort))]
    parts: dict[int, float] = {}
    outcomes = work(jobs, tmp_path, 2, report=lambda number, share: parts.update({number: share}))
    assert outcomes.keys() == set(range(6))
    assert all(isinstance(outcome, Converted) for outcome in outcomes.values())
    again = work(jobs, tmp_path, 1)
    assert all(outcome.skipped for outcome in again.values())  # type: ignore[union-attr]
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_process_that_dies_costs_its_slide_only(cohort: Path, tmp_path: Path, monkeypatch) -> None:
    """A reader's crash kills the whole process; the slide is found and named, the others are converted."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import crashing

    monkeypatch.setattr(pool, "_attempt_in_worker", crashing.attempt_in_worker)
    jobs = [item.job for item in list_slides(str(cohort))]
    outcomes = work(jobs, tmp_path, 2)
    assert outcomes.keys() == set(range(6))
    failed = [jobs[n].name for n, outcome in outcomes.items() if isinstance(outcome, Failure)]
    assert failed == ["slide_0002"]
    failure = next(outcome for outcome in outcomes.values() if isinstance(outcome, Failure))
    assert failure.kind == "ProcessDied"
    assert "slide_0002" in failure.slide


@pytest.mark.slow
def test_slide_that_hangs_is_given_up_and_the_others_go_on(cohort: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import crashing

    monkeypatch.setattr(pool, "_attempt_in_worker", crashing.hang_in_worker)
    jobs = [item.job for item in list_slides(str(cohort))]
    monkeypatch.setattr(pool, "limit_of", lambda job, stall: 1.5 if job.name in crashing.HANGING else None)
    outcomes = work(jobs, tmp_path, 2, stall=90)
    assert outcomes.keys() == set(range(6))
    failed = {jobs[n].name: outcome for n, outcome in outcomes.items() if isinstance(outcome, Failure)}
    assert failed.keys() == {"slide_0001", "slide_0003"}
    assert {failure.kind for failure in failed.values()} == {"Stalled"}
    for failure in failed.values():
        assert "not done after 0.025 minutes, which its size does not explain" in failure.reason
    assert multiprocessing.active_children() == []


def test_a_slide_may_take_longer_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "large.svs").write_bytes(bytes(10 << 20))
    large, absent = (Job(tmp_path / name, "s") for name in ("large.svs", "absent.svs"))
    assert pool.limit_of(large, 60.0) == 60 + 20
    assert pool.limit_of(absent, 60.0) == 60
    assert pool.limit_of(large, None) is None


@pytest.mark.slow
def test_dask_cluster(cohort: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="extra cluster is not installed")
    (cohort.parent / "slides" / "z.svs").write_bytes(b"nothing")
    try:
        arguments = ["preprocess", str(cohort.parent / "slides"), str(tmp_path), "--scheduler", "dask"]
        assert main([*arguments, "--workers", "2"]) == 1
    finally:
        (cohort.parent / "slides" / "z.svs").unlink()
    assert len(rows(tmp_path / "stores.csv")) == 6
    assert [Path(row["slide"]).name for row in rows(tmp_path / "failures.csv")] == ["z.svs"]


@pytest.mark.slow
def test_dask_tells_of_progress_and_gives_up_slides_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="extra cluster is not installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import crashing

    monkeypatch.setattr(pool, "limit_of", lambda job, stall: 1.5 if job.name in crashing.HANGING else 600.0)
    jobs = [Job(tmp_path / f"{number}.svs", f"slide_{number:04}") for number in range(5)]
    told: dict[int, list[float]] = {number: [] for number in range(5)}
    outcomes = dict(
        pool.work_on_dask(
            crashing.work_on_dask, jobs, workers=2, address="dask", stall=90,
            report=lambda number, share: told[number].append(share),
        )
    )  # fmt: skip
    failed = {jobs[number].name for number, outcome in outcomes.items() if isinstance(outcome, Failure)}
    assert failed == set(crashing.HANGING) and len(outcomes) == 5
    assert {outcome.kind for outcome in outcomes.values() if isinstance(outcome, Failure)} == {"Stalled"}
    for number, shares in told.items():
        assert shares[:2] == [0.0, 0.25] and (1.0 in shares) == (jobs[number].name not in crashing.HANGING)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/none", "{tmp}/out"], "no slide there"),
        (["{tmp}", "{tmp}/out"], "no slide there"),
        (["{slides}", "{tmp}/out", "--shard", "3/2"], "--shard 3/2"),
        (["{slides}", "{tmp}/out", "--shard", "x"], "expected i/n"),
        (["{slides}", "{tmp}/out", "--tissue", "none", "--background", "constant"], "needs a tissue mask"),
        (["{slides}", "{tmp}/out", "--mpp", "-1"], "--mpp -1"),
        (["{slides}", "{tmp}/out", "--mpp", "10000"], "--mpp 10000: expected micrometres per pixel, above 0 and below"),
        (["{slides}", "{tmp}/out", "--mpp", ""], "--mpp is empty"),
        (["{slides}", ""], "an argument is empty"),
        (["{slides}", "{tmp}/out", "--levels", "0"], "--levels 0"),
        (["{slides}", "{tmp}/out", "--levels", "25"], "--levels 25: expected 1 to 24"),
        (["{slides}", "{tmp}/out", "--workers", "0"], "--workers 0: expected 1 or more"),
        (["{slides}", "{tmp}/out", "--stall-minutes", "-1"], "--stall-minutes -1"),
        (["{bad}", "{tmp}/out"], "no column 'slide'"),
        (["{badmpp}", "{tmp}/out"], "line 2: mpp is 'half'"),
    ],
)
def test_wrong_arguments_are_one_line(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "bad.csv").write_text("path\na.svs\n")
    (lists / "badmpp.csv").write_text("slide,mpp\na.svs,half\n")
    places = {
        "tmp": tmp_path,
        "slides": cohort.parent / "slides",
        "bad": lists / "bad.csv",
        "badmpp": lists / "badmpp.csv",
    }
    assert main(["preprocess", *(a.format(**places) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_scheduler_that_does_not_answer_is_named(
    cohort: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    distributed = pytest.importorskip("distributed", reason="extra cluster is not installed")
    client = distributed.Client
    monkeypatch.setattr(distributed, "Client", lambda address, timeout: client(address, timeout=0.5))
    assert main(["preprocess", str(cohort), str(tmp_path), "--scheduler", "tcp://127.0.0.1:1"]) == 2
    assert "no Dask scheduler" in capsys.readouterr().err


def test_names_keep_folders_and_never_meet(tmp_path: Path) -> None:
    for name in (
        "a/s.tif",
        "b/s.tif",
        "b/t.svs",
        "b/t.ndpi",
        "b/u.ome.tiff",
        "notes.txt",
        "labels.csv",
        ".hidden.tif",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"?")
    names = [item.job.name for item in list_slides(str(tmp_path))]
    assert names == ["a/s", "b/s", "b/t.ndpi", "b/t.svs", "b/u"]
    pattern = [item.job.name for item in list_slides(f"{tmp_path}/b/*.svs")]
    assert pattern == ["t"]
    with pytest.raises(UserError, match=r"several slides are named s\.tif"):
        list_slides(f"{tmp_path}/*/s.tif")


def test_folders_that_are_slides_are_not_entered(real_slides: Path, store: Path, tmp_path: Path) -> None:
    (tmp_path / "s.zarr").symlink_to(store)
    (tmp_path / "dicom").symlink_to(real_slides / "CMU-1-Small-Region_dicom")
    (tmp_path / "m.mrxs").write_bytes(b"?")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "Data0000.tif").write_bytes(b"?")
    assert [item.job.name for item in list_slides(str(tmp_path))] == ["dicom", "m", "s"]


@pytest.mark.slow
def test_fluorescence_keeps_its_ground(real_slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Painted white it would have a frame with hard edges, and no nuclei outside of the mask."""
    dark = str(real_slides / "test3-DAPI-2-(387).ndpi")
    for _ in range(2):
        assert main(["preprocess", dark, str(tmp_path / "a"), "--background", "constant"]) == 1
        assert "its ground is black" in " ".join(capsys.readouterr().out.split())
    assert main(["preprocess", dark, str(tmp_path / "a")]) == 0
    with Slide.open(tmp_path / "a" / "test3-DAPI-2-(387).zarr") as store, Slide.open(dark) as slide:
        assert (store.read(0, 0, 0, 900, 900) == slide.read(0, 0, 0, 900, 900)).all()
