"""The doctor finds what is broken, says how to mend it, and fails only for what must work."""

import json
import sys

from rich.console import Console

from lightning_plugin import memory as budgets
from wsi_trainer import doctor
from wsi_trainer.cli import main
from wsi_trainer.doctor import Check, Status, healthy, show


def by_name(checks):
    return {check.name: check for check in checks}


def test_everything_that_must_work_works_here(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in report["checks"]}
    for name in ("torch", "device", "memory", "OpenSlide, tiled TIFF", "zarr v3, sharded zstd + crc32c"):
        assert found[name]["status"] == "ok", found[name]
    for codec in doctor.CODECS:
        assert found[f"tifffile, {codec}"]["status"] == "ok"


def test_table_shows_every_check_and_every_fix(capsys):
    checks = [
        Check("readers", "OpenSlide", Status.FAILED, "OSError: gone", "pip install openslide-bin"),
        Check("extras", "dicom", Status.ABSENT, "wsidicom not installed", "pip install 'wsi-trainer[dicom]'"),
    ]
    show(checks, Console(width=120))
    shown = capsys.readouterr().out
    for check in checks:
        assert check.detail in shown
        assert check.fix in shown
    assert "does not" in shown


def test_a_broken_reader_fails_the_doctor(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "openslide", None)
    assert main(["doctor", "--json"]) == 1
    found = by_name_json(capsys.readouterr().out)
    assert found["OpenSlide, tiled TIFF"]["status"] == "failed"
    assert "openslide-bin" in found["OpenSlide, tiled TIFF"]["fix"]


def by_name_json(text):
    return {check["name"]: check for check in json.loads(text)["checks"]}


def test_a_codec_that_changes_pixels_is_found(monkeypatch):
    import tifffile

    monkeypatch.setattr(tifffile, "imread", lambda path: doctor.PIXELS[..., ::-1])
    found = by_name(doctor.check_formats())
    assert found["tifffile, lzw"].status is Status.FAILED
    assert "pixels differ" in found["tifffile, lzw"].detail
    assert found["zarr v3, sharded zstd + crc32c"].status is Status.OK


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_missing_extra_names_the_command_that_adds_it(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "tensorstore" else "1.0")
    found = by_name(doctor.check_packages())
    assert found["fast"].status is Status.ABSENT
    assert found["fast"].fix == "pip install 'wsi-trainer[fast]'"
    assert "tensorstore not installed" in found["fast"].detail
    assert found["dicom"].status is Status.OK
    assert healthy(found.values())


def test_missing_requirement_fails(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "tifffile" else "1.0")
    found = by_name(doctor.check_packages())
    assert found["tifffile"].status is Status.FAILED
    assert found["tifffile"].fix == "pip install tifffile"
    assert not healthy(found.values())


def test_little_disk_is_a_warning(tmp_path, monkeypatch):
    usage = doctor.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage._replace(free=5 * doctor.GIB))
    check = doctor.disk("disk", tmp_path)
    assert check.status is Status.WARNING
    assert "5.0 GiB free" in check.detail
    assert healthy([check])


def test_container_limit_is_reported(monkeypatch):
    monkeypatch.setattr(budgets, "group_limit", lambda: 2 * doctor.GIB)
    assert doctor.memory().startswith("2.0 GiB (limit of the container or the job")


def test_rates_are_measured_when_asked(monkeypatch, tmp_path, capsys):
    from lightning_plugin import Rates
    from lightning_plugin.planner.cache import VARIABLE
    from lightning_plugin.planner.calibration import calibrate

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(calibrate, "measure", lambda device: Rates(62e9, 7e9, 7e9, 1.5e9, 2e-5))
    before = doctor.rates()
    assert (before.status, before.fix) == (Status.ABSENT, "wsi-train doctor --calibrate")
    assert main(["doctor", "--json", "--calibrate"]) == 0
    found = by_name_json(capsys.readouterr().out)["rates"]
    assert found["status"] == "ok"
    assert found["detail"].startswith(
        "62 GFLOP/s, memory 7.0 GB/s, host 7.0 GB/s, disk 1.50 GB/s (files in memory 1.50 GB/s), 20 µs"
    )
