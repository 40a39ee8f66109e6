"""A run as a custom encoder of TRIDENT and STAMP gives the features of `embed` and the predictions of `predict`.

The classes here have the signatures of theirs (TRIDENT a91fa84, STAMP c54ce06) and ask the same of what they are given.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lightning_plugin import Box
from wsi_trainer.cli import main
from wsi_trainer.data.features import FeatureSource
from wsi_trainer.errors import UserError
from wsi_trainer.fit.run import Run
from wsi_trainer.neighbours import PatchFeatures, SlideFeatures, stamp_encoder
from wsi_trainer.slide import Slide


class CustomInferenceEncoder(nn.Module):
    """TRIDENT's, with what `extract_patch_features` does."""

    def __init__(self, enc_name: str, model: nn.Module, transforms: Callable[[Any], Tensor], precision: torch.dtype):
        super().__init__()
        self.enc_name, self.model, self.eval_transforms, self.precision = enc_name, model, transforms, precision

    def extract(self, pictures: list[Image.Image]) -> np.ndarray:
        self.to("cpu").eval()
        transform = pickle.loads(pickle.dumps(self.eval_transforms))  # for the workers of its loader
        images = torch.stack([transform(picture) for picture in pictures])
        with torch.inference_mode(), torch.autocast("cpu", self.precision, enabled=self.precision != torch.float32):
            return self.model(images).cpu().numpy()


def extract_slide_features(path: Path, slide_encoder: Any, device: str) -> np.ndarray:
    """Do with an encoder of slides as TRIDENT's function of this name does."""
    slide_encoder.to(device)
    slide_encoder.eval()
    with h5py.File(path) as file:
        batch = {"features": torch.from_numpy(file["features"][:]).float()[None], "attributes": {}}
        batch["coords"] = torch.from_numpy(file["coords"][:])[None]
    with torch.inference_mode(), torch.autocast("cpu", enabled=slide_encoder.precision != torch.float32):
        return slide_encoder(batch, device).float().cpu().numpy().squeeze()


@dataclass(frozen=True)
class Extractor:
    """STAMP's."""

    _: KW_ONLY
    model: nn.Module
    transform: Callable[[Image.Image], Tensor]
    identifier: str


class Encoder(ABC):
    """STAMP's, of slides."""

    def __init__(self, model: Any, identifier: Any, precision: torch.dtype, required_extractors: list[Any]):
        self.model, self.identifier, self.precision = model, identifier, precision
        self.required_extractors = required_extractors

    @abstractmethod
    def _generate_slide_embedding(self, feats: Tensor, device: Any, **kwargs: Any) -> np.ndarray: ...

    @abstractmethod
    def _generate_patient_embedding(self, feats_list: list[Tensor], device: Any, **kwargs: Any) -> np.ndarray: ...


def pictures_of(folder: Path, name: str) -> tuple[list[Image.Image], np.ndarray]:
    """The patches of a slide as other programs cut them, at the places of the file of features, and its features."""
    with h5py.File(folder / "features" / f"{name}.h5") as file, Slide.open(folder / f"{name}.zarr") as slide:
        side = int(file["coords"].attrs["patch_size_level0"])
        cut = [slide.read(0, int(y), int(x), side, side) for x, y in file["coords"]]
        return [Image.fromarray(one).convert("RGBA") for one in cut], file["features"][:]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_features_in_trident_and_stamp_are_those_of_embed(on_patches: Path, tmp_path: Path, precision: str) -> None:
    folder, run = on_patches, on_patches / "run"
    if precision != "32-true":
        out = tmp_path / "features"
        words = [f"--config={run / 'config.yaml'}", f"--out={out}", f"--train.precision={precision}"]
        assert main(["embed", *words, f"--checkpoint={run / 'checkpoints' / 'best.ckpt'}"]) == 0
        for name in ("s5.zarr", "s6.zarr"):
            (tmp_path / name).symlink_to(folder / name)
        folder = tmp_path
    encoder = PatchFeatures.open(run, overrides=[f"--train.precision={precision}"])
    assert (encoder.size, encoder.mpp, encoder.embedding_dim) == (32, 0.5, 8)
    theirs = CustomInferenceEncoder(encoder.name, encoder, encoder.transform, torch.float32)
    other = Extractor(model=encoder, transform=encoder.transform, identifier=encoder.name)
    for name in ("s5", "s6"):
        pictures, expected = pictures_of(folder, name)
        np.testing.assert_allclose(theirs.extract(pictures), expected, atol=1e-6)
        with torch.inference_mode():
            found = other.model.to("cpu").eval()(torch.stack([other.transform(one) for one in pictures]))
        np.testing.assert_array_equal(found.half().numpy(), expected.astype(np.float16))
    with h5py.File(folder / "features" / "s6.h5") as file:
        assert encoder.name == f"run-{file['features'].attrs['weights_sha256'][:8]}"


def test_a_whole_model_is_a_slide_encoder_of_both(on_patches: Path) -> None:
    run, file = Run.open(on_patches / "run"), on_patches / "features" / "s6.h5"
    expected = list(run.predict(on_patches / "s6.zarr").values())
    says = SlideFeatures.open(run.path, "prediction")
    np.testing.assert_allclose(extract_slide_features(file, says, "cpu"), expected, atol=1e-6)
    assert says.names == tuple(run.predict(on_patches / "s6.zarr"))
    vector = SlideFeatures.open(run.path)
    assert extract_slide_features(file, vector, "cpu").shape == (vector.embedding_dim,) == (8,)
    rows = FeatureSource(file).load(Box((0, 0), (FeatureSource(file).shape[2], 1)))[0, :, :, 0].t()
    stamp = stamp_encoder(Encoder, says, says.family)
    assert stamp.identifier == says.name and stamp.required_extractors == ["run"]
    np.testing.assert_allclose(stamp._generate_slide_embedding(rows, "cpu", coords=None), expected, atol=1e-6)
    half = len(rows) // 2
    of_patient = stamp._generate_patient_embedding([rows[:half], rows[half:]], "cpu")
    np.testing.assert_allclose(of_patient, expected, atol=1e-6)
    with pytest.raises(UserError, match="takes 8 of each patch"):
        vector(torch.zeros(1, 5, 9))


def test_what_does_not_fit_is_named(on_patches: Path, tmp_path: Path) -> None:
    encoder = PatchFeatures.open(on_patches / "run")
    with pytest.raises(UserError, match=r"40 × 40 pixels, and the encoder takes 32 × 32 at 0\.5 µm"):
        encoder.transform(Image.new("RGB", (40, 40)))
