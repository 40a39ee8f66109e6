"""A trained model as a custom encoder of TRIDENT and STAMP: plain modules, which need neither of the two.

Both ask an encoder of patches for a module, and for a transform from a picture to what the module takes. An encoder of
slides takes the features of a slide's patches. The modules keep the precision of the run, and return float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from wsi_trainer.embed import digest
from wsi_trainer.errors import UserError
from wsi_trainer.fit.predictor import Predictor
from wsi_trainer.models import FrozenFeatures, PatchEncoder, SlideClassifier
from wsi_trainer.models.finetune import merge_low_rank

PART_OF_DIGEST = 8
"""Digits of the checksum of the weights in a name: STAMP asks for one that changes with the weights."""


@dataclass(frozen=True)
class PatchPixels:
    """From the picture of a patch to its pixels, (3, size, size) of 8 bits. Loaders of both programs can pickle it."""

    size: int
    mpp: float | None

    def __call__(self, picture: Image.Image) -> Tensor:
        """The pixels of a picture.

        Raises:
            UserError: It has another size, and so another resolution than the encoder was trained at.
        """
        if picture.size != (self.size, self.size):
            at = "at the resolution of the run" if self.mpp is None else f"at {self.mpp:g} µm a pixel"
            raise UserError(
                f"a patch has {picture.width} × {picture.height} pixels, and the encoder takes {self.size} × "
                f"{self.size} {at}; cut patches of that size"
            )
        return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).contiguous()


class _Handed(nn.Module):
    """A model in the precision of its run, under any caller's."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.model, self._autocast, origin = predictor.model, predictor.autocast, predictor.origin
        merge_low_rank(self.model.backbone)
        self.family = type(self.model).__name__ if origin is None else origin.path.resolve().name
        """The name of the run or folder."""
        self.name = f"{self.family}-{digest(self.model)[:PART_OF_DIGEST]}"

    @classmethod
    def open(cls, path: str | Path, **how: Any) -> Self:
        """The encoder of a run, of a checkpoint in one, or of an exported folder.

        Args:
            path: Its path.
            how: Further arguments of `Predictor.open`.
        """
        return cls(Predictor.open(path, **how))

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """Autocast of the run; a caller's own, as TRIDENT's, does not count."""
        return torch.autocast(device.type, self._autocast, enabled=self._autocast is not None)


class PatchFeatures(_Handed):
    """The vectors of patches by the encoder of a run, as `wsi-train embed` writes them: (patches, width).

    >>> encoder = PatchFeatures.open("runs/first")                                           # doctest: +SKIP
    >>> CustomInferenceEncoder(encoder.name, encoder, encoder.transform, torch.float32)      # doctest: +SKIP
    >>> Extractor(model=encoder, transform=encoder.transform, identifier=encoder.name)       # doctest: +SKIP
    """

    def __init__(self, predictor: Predictor) -> None:
        """Take the encoder of an opened model.

        Args:
            predictor: The model.

        Raises:
            UserError: It encodes no patches.
        """
        super().__init__(predictor)
        encoder, data = self.model.backbone, predictor.loaded.data
        if not isinstance(encoder, PatchEncoder) or data.patches is None:
            raise UserError(f"model.backbone is {type(encoder).__name__}, which encodes no patches; use PatchEncoder")
        self.size, self.embedding_dim = encoder.size, encoder.out_channels
        seen = None if predictor.origin is None else predictor.origin.seen
        own = None if seen is None else seen.finest
        self.mpp = own if data.patches.mpp == "own" else float(data.patches.mpp)
        """Micrometres per pixel of a patch; None where the run takes slides as they are, and does not know it."""
        self.transform = PatchPixels(self.size, self.mpp)

    def forward(self, patches: Tensor) -> Tensor:
        """The vectors of patches, (patches, 3, size, size) of 8 bits, or of numbers from 0 to 1."""
        encoder = self.model.backbone
        assert isinstance(encoder, PatchEncoder)
        with self._precision(patches.device):
            return encoder.vectors(self.model.normalise(patches)).float()


class SlideFeatures(_Handed):
    """The vector of a slide, or its prediction, from the features of its patches: (1, entries).

    The features are those that the run was trained on, or, of a run on patches, those of its `PatchFeatures`.

    TRIDENT takes it as it is, since its `extract_slide_features` hands an encoder a device too, which its own
    `CustomSlideEncoder` does not take.

    >>> encoder = SlideFeatures.open("runs/first")                                           # doctest: +SKIP
    >>> slide.extract_slide_features("features/slide.h5", encoder, "vectors")                # doctest: +SKIP
    """

    def __init__(self, predictor: Predictor, gives: Literal["vector", "prediction"] = "vector") -> None:
        """Take the head of an opened model.

        Args:
            predictor: The model.
            gives: The pooled vector before the last layer, or the numbers that `wsi-train predict` writes.

        Raises:
            UserError: It is no head on features.
        """
        super().__init__(predictor)
        model = self.model
        on_features = isinstance(model.backbone, PatchEncoder | FrozenFeatures)
        if not isinstance(model, SlideClassifier) or not on_features or model.magnifications > 1:
            raise UserError(
                f"{self.family} is no head on features of patches at one magnification; use a run with "
                "model.backbone PatchEncoder or FrozenFeatures"
            )
        if gives == "prediction" and model.covariates:
            raise UserError(
                f"{self.family} predicts from covariates too ({', '.join(model.covariates.names)}), which features do "
                "not have; take its vector"
            )
        self.gives, self.width = gives, int(model.backbone.out_channels)  # type: ignore[arg-type]
        self.names: tuple[str, ...] = model.task.names
        """The names of the numbers of a prediction."""
        self.enc_name, self.precision = self.name, torch.float32  # as TRIDENT calls them
        self.embedding_dim = len(self.names) if gives == "prediction" else model.head.out_channels

    @classmethod
    def open(cls, path: str | Path, gives: Literal["vector", "prediction"] = "vector", **how: Any) -> Self:
        """The head of a run, of a checkpoint in one, or of an exported folder.

        Args:
            path: Its path.
            gives: The pooled vector before the last layer, or the numbers that `wsi-train predict` writes.
            how: Further arguments of `Predictor.open`.
        """
        return cls(Predictor.open(path, **how), gives)

    def forward(self, slide: Tensor | Mapping[str, Any], device: Any = None) -> Tensor:
        """The vector or the prediction of a slide.

        Args:
            slide: The features, (patches, width) or (1, patches, width), or TRIDENT's batch with `features`, whose
                `coords` a head that asks for places needs.
            device: Where it runs; by default where the features are.
        """
        given = slide["features"] if isinstance(slide, Mapping) else slide
        given = given.to(device or given.device)
        features: Tensor = given[0] if given.ndim == 3 and len(given) == 1 else given
        if features.ndim != 2 or features.shape[1] != self.width:
            raise UserError(
                f"features have the shape {tuple(given.shape)}, and {self.family} takes {self.width} of each patch of "
                "one slide; make them with the encoder of this run"
            )
        model = self.model
        assert isinstance(model, SlideClassifier)
        with self._precision(features.device):
            places = _places_in(slide, features) if model.wants_places and isinstance(slide, Mapping) else None
            vector = model.pool_features(features.to(model.mean.dtype).t()[None, :, :, None], places=places)
            found = vector if self.gives == "vector" else model.task.predict(model.forward_head(vector).float())
        return found.float()


def _places_in(batch: Mapping[str, Any], features: Tensor) -> Tensor:
    """The places of patches in TRIDENT's batch, as a head takes them."""
    corners = batch["coords"].reshape(-1, 2).to(features.device, torch.float64)
    return (corners / float(batch["attributes"]["patch_size_level0"])).t()[None, :, :, None].float()


def stamp_encoder(base: type, slides: SlideFeatures, extractor: str) -> Any:
    """An encoder of slides and patients for STAMP: a patient's slides are one bag.

    Args:
        base: `stamp.encoding.encoder.Encoder`.
        slides: What encodes.
        extractor: The name of the extractor of the features, such as `PatchFeatures.family`.
    """

    def encoded(features: Tensor, device: Any) -> np.ndarray:
        with torch.inference_mode():
            return slides(features.to(device))[0].cpu().numpy()

    def of_slide(self: Any, feats: Tensor, device: Any, **_: Any) -> np.ndarray:
        return encoded(feats, device)

    def of_patient(self: Any, feats_list: Sequence[Tensor], device: Any, **_: Any) -> np.ndarray:
        return encoded(torch.cat(list(feats_list)), device)

    methods = {"_generate_slide_embedding": of_slide, "_generate_patient_embedding": of_patient}
    return type("SlideEncoder", (base,), methods)(slides, slides.name, torch.float32, [extractor])
