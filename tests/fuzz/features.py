"""Features and weights: HDF5 of this package and of CLAM, files of torch.save and of safetensors."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from safetensors.torch import save_file

from lightning_plugin import Box
from tests.fuzz.kinds import Target, Unjudged
from tests.fuzz.mutations import BINARY, TEXT
from wsi_trainer.data.features import FeatureSource
from wsi_trainer.data.patches.hdf5 import read_coords
from wsi_trainer.embed.layouts import Written, write
from wsi_trainer.models.weights import read_checkpoint, read_weights


def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(40, 24)).astype(np.float32)


def own(folder: Path) -> Sequence[Path]:
    corners = np.stack([np.arange(40.0) * 8, np.zeros(40)], axis=1)
    about = Written(name="s", corners=corners, slide=(400, 400), scale=1.0, size=8, step=8, mpp=0.5, encoder="e",
                    weights="w", origin="o")  # fmt: skip
    write(folder / "slide.h5", rows(), about, "trident")
    return [folder / "slide.h5"]


def clams(folder: Path) -> Sequence[Path]:
    with h5py.File(folder / "slide.h5", "w") as file:
        file["features"] = rows()
        coords = file.create_dataset("coords", data=np.arange(80).reshape(40, 2))
        coords.attrs["patch_size"], coords.attrs["patch_level"] = 8, 0
    return [folder / "slide.h5"]


def read_features(path: Path) -> Any:
    source = FeatureSource(path)
    return np.asarray(source.read(Box.whole(source.shape[2:])))[0, :, :, 0].T


def features_truth(path: Path) -> Any:
    try:
        with h5py.File(path, "r") as file:
            found = file["features"]
            return np.asarray(found[()], np.float32) if found.ndim == 2 else np.asarray(found[0], np.float32)
    except Exception as error:
        raise Unjudged from error


def read_places(path: Path) -> Any:
    found = read_coords(path)
    return [np.asarray(found.points, np.float64), found.side]


def places_truth(path: Path) -> Any:
    try:
        with h5py.File(path, "r") as file:
            coords = file["coords"]
            side = coords.attrs.get("patch_size_level0", coords.attrs.get("patch_size"))
            if "downsample" in coords.attrs:
                raise Unjudged
            return [np.asarray(coords[()], np.float64), float(side)]
    except Exception as error:
        raise Unjudged from error


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.randn(8, 3, 3, 3), "a.bias": torch.randn(8), "count": torch.tensor(5)}


def checkpoints(folder: Path) -> Sequence[Path]:
    torch.save({"state_dict": state(), "epoch": 3, "loops": {"step": 7}}, folder / "best.ckpt")
    return [folder / "best.ckpt"]


def read_state(path: Path) -> Any:
    return {name: np.asarray(value) for name, value in read_checkpoint(path)["state_dict"].items()}


def checkpoint_truth(path: Path) -> Any:
    """What the archive's checksums vouch for is as it was: all that is read of it is in a checked part."""
    with zipfile.ZipFile(path) as archive:
        if archive.testzip() is not None:
            return "damaged"
    return {name: np.asarray(value) for name, value in state().items()}


def tensors(folder: Path) -> Sequence[Path]:
    save_file(state(), folder / "weights.safetensors")
    return [folder / "weights.safetensors"]


def read_tensors(path: Path) -> Any:
    return {name: np.asarray(value.float()) for name, value in read_weights(path).items()}


def tensors_truth(path: Path) -> Any:
    """The header by hand, and the numbers behind it."""
    data = path.read_bytes()
    try:
        size = int.from_bytes(data[:8], "little")
        found = {}
        for name, said in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            kind = {"F32": "<f4", "I64": "<i8", "F16": "<f2", "F64": "<f8", "I32": "<i4", "U8": "u1"}[said["dtype"]]
            low, high = said["data_offsets"]
            values = np.frombuffer(data[8 + size + low : 8 + size + high], kind).reshape(said["shape"])
            found[name] = values.astype(np.float32)
        return found
    except Exception as error:
        raise Unjudged from error


TARGETS = (
    Target("features, own", own, read_features, None, BINARY),
    Target("features of CLAM", clams, read_features, features_truth, BINARY),
    Target("places of CLAM", clams, read_places, places_truth, BINARY),
    Target("checkpoint", checkpoints, read_state, checkpoint_truth, BINARY),
    Target("safetensors", tensors, read_tensors, tensors_truth, (*BINARY, *TEXT)),
)
