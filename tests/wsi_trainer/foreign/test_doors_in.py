"""What the door for files of others refuses: what is no file, what is too large, and what would run or read another."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import zarr
from PIL import Image

from wsi_trainer.data.features import FeatureSource
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.arrays import load_array, open_zarr_array
from wsi_trainer.io.untrusted import (
    DECODED,
    TEXT,
    Unreadable,
    read_bytes,
    read_json,
    read_picture,
    read_xml,
    read_yaml,
)
from wsi_trainer.models.weights import read_weights, write_weights
from wsi_trainer.regions.target import open_labels

ROWS = np.random.default_rng(3).normal(size=(30, 16)).astype(np.float32)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(Unreadable, match=r"a.json: is a named pipe and not a file"):
        read_json(tmp_path / "a.json")


def test_an_endless_device_is_not_read() -> None:
    with pytest.raises(Unreadable, match=r"/dev/zero: is a device"):
        read_bytes(Path("/dev/zero"))


def test_a_large_file_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "a.geojson").open("wb") as file:
        file.truncate(3 << 20)  # sparse
    monkeypatch.setenv(TEXT.variable, "2")
    with pytest.raises(Unreadable, match=r"has 3 MiB, more than the limit of 2 .* set WSI_TRAIN_MAX_TEXT_MIB=3"):
        read_json(tmp_path / "a.geojson")
    monkeypatch.setenv(TEXT.variable, "3")
    assert len(read_bytes(tmp_path / "a.geojson")) == 3 << 20


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "is no JSON: Expecting"),
        (b"\xff\xfe\xff", "is no JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
        (b"9" * 5000, "is no JSON: Exceeds the limit"),
    ],
)
def test_what_is_no_json(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(Unreadable, match=f"a.json: .*{said}"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: 1\na: 2", "the key 'a' is there twice"), ("a: !!python/object/apply:os.getcwd []", "python/object/apply"),
     ("a: 2020-99-99", "is no YAML"), ("[" * 200, "nested more than 100 deep")],
)  # fmt: skip
def test_what_is_no_yaml(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(Unreadable, match=f"a.yaml: .*{said}"):
        read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [('<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>', "declares entities"),
     ("<a>" * 2000, "has elements nested more than 1000 deep"), ("<a>", "is no whole XML file")],
)  # fmt: skip
def test_what_is_no_xml(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.xml").write_text(text)
    with pytest.raises(Unreadable, match=f"a.xml: {said}"):
        read_xml(tmp_path / "a.xml", lambda tag, its: None, lambda tag: None)


class _Trap:
    """What is unpickled makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_arrays_of_objects_are_not_unpickled(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    np.save(tmp_path / "a.npy", np.array([_Trap(trap)], dtype=object), allow_pickle=True)
    (tmp_path / "b.npy").write_bytes(pickle.dumps(_Trap(trap)))
    for name in ("a.npy", "b.npy"):
        with pytest.raises(Unreadable, match=name):
            load_array(tmp_path / name)
    assert not trap.exists()


def test_a_codec_that_runs_code_is_not_run(tmp_path: Path) -> None:
    """A label image in zarr, whose chunk is a pickle: reading it would call what it names."""
    trap, path = tmp_path / "sprung", tmp_path / "label.zarr"
    zarr.create_array(path, shape=(4, 4), dtype="u1", chunks=(4, 4), compressors=None, zarr_format=2)[:] = 1
    about = path / ".zarray"
    about.write_text(about.read_text().replace('"compressor": null', '"compressor": {"id": "pickle"}'))
    assert "pickle" in about.read_text()
    (path / "0.0").write_bytes(pickle.dumps(_Trap(trap)))
    for opener in (open_labels, open_zarr_array):
        with pytest.raises(UserError, match=r"'pickle'|broken zarr store|is no label image"):
            opener(path)
    assert not trap.exists()


def test_a_label_image_names_no_array_outside(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "label.zarr", mode="w")
    zarr.create_array(tmp_path / "secret", shape=(4, 4), dtype="u1", chunks=(4, 4))[:] = 1
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"datasets": [{"path": "../secret"}]}]}
    with pytest.raises(UserError, match=r"expected a name inside the store"):
        open_labels(tmp_path / "label.zarr")


@pytest.mark.parametrize("how", ["link", "external", "virtual"])
def test_features_that_lie_in_another_file(tmp_path: Path, how: str) -> None:
    """A file of features must not show what another file of this machine holds."""
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["features"] = ROWS
    (tmp_path / "secret.bin").write_bytes(ROWS.tobytes())
    with h5py.File(tmp_path / "slide.h5", "w") as file:
        if how == "link":
            file["features"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "features")
        elif how == "external":
            external = [(str(tmp_path / "secret.bin"), 0, ROWS.nbytes)]
            file.create_dataset("features", ROWS.shape, np.float32, external=external)
        else:
            layout = h5py.VirtualLayout(ROWS.shape, np.float32)
            layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "features", ROWS.shape)
            file.create_virtual_dataset("features", layout)
    with pytest.raises(SlideError, match=r"slide.h5: .*(link to another file|lie in another file)"):
        FeatureSource(tmp_path / "slide.h5")


def test_a_changed_weight_is_found(tmp_path: Path) -> None:
    """PyTorch does not look at the checksums of its own files."""
    weights = torch.arange(1000.0)
    path = tmp_path / "best.ckpt"
    write_weights(path, {"a": weights})
    assert torch.equal(read_weights(path)["a"], weights)
    data = bytearray(path.read_bytes())
    data[data.index(weights[10:20].numpy().tobytes())] ^= 64
    path.write_bytes(data)
    assert not torch.equal(torch.load(path, weights_only=True)["a"], weights), "PyTorch still does not"
    with pytest.raises(UserError, match=r"best.ckpt is damaged: the checksum of its part .*data/0 does not match"):
        read_weights(path)


def test_pictures_of_other_formats_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Image.new("RGB", (600, 500), (1, 2, 3))
    picture.save(tmp_path / "a.png")
    assert read_picture(tmp_path / "a.png", "RGB").getpixel((3, 3)) == (1, 2, 3)
    picture.save(tmp_path / "b.png", "BMP")
    with pytest.raises(Unreadable, match=r"b.png: is no picture"):
        read_picture(tmp_path / "b.png")
    monkeypatch.setenv(DECODED.variable, "1")
    with pytest.raises(Unreadable, match=r"a.png: a picture of 600 x 500 px .* WSI_TRAIN_MAX_DECODED_MIB"):
        read_picture(tmp_path / "a.png")
