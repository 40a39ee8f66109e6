"""The doctor finds what is broken, says how to mend it, and fails only for what must work."""

import json
import sys

from wsi_trainer import doctor
from wsi_trainer.cli import main
from wsi_trainer.doctor import Status, healthy


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


def test_nothing_is_left_behind_and_every_check_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "tensorstore" else "1.0")
    assert main(["doctor"]) == 0
    assert list(tmp_path.iterdir()) == []
    shown = " ".join(capsys.readouterr().out.split())
    assert "zarr v3, sharded" in shown and "pip install 'wsi-trainer[fast]'" in shown


def test_missing_extra_names_the_command_that_adds_it(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "tensorstore" else "1.0")
    found = by_name(doctor.check_packages())
    assert found["fast"].status is Status.ABSENT
    assert found["fast"].fix == "pip install 'wsi-trainer[fast]'"
    assert "tensorstore not installed" in found["fast"].detail
    assert found["dicom"].status is Status.OK
    assert healthy(found.values())


def test_rates_are_measured_when_asked(monkeypatch, tmp_path, capsys):
    from lightning_plugin import Rates
    from lightning_plugin.planner import calibrate
    from lightning_plugin.planner.cache import VARIABLE

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
