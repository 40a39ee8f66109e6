"""`Predictor`: the model of a run on slides, one after the other, without a Trainer and without writing anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_plugin import TiledModule
from lightning_plugin.memory import default_budget
from wsi_trainer.data.datamodule import in_order
from wsi_trainer.data.dataset import SlideDataset, grouped
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import AUTO, Loaded, TrainConfig
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.trainer import device_of, engine_options, image_of, precision_of
from wsi_trainer.models.slide_model import SlideBatch, SlideModel

DTYPES = {"64": torch.float64, "32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Prediction:
    """The numbers that the model predicts of one slide."""

    slide: str
    """Its name."""
    names: tuple[str, ...]
    """The names of the numbers, as the columns of `wsi-train predict`."""
    values: NDArray[np.float64]
    """The numbers, in the same order."""

    def to_dict(self) -> dict[str, float]:
        """The numbers by their names."""
        return dict(zip(self.names, map(float, self.values), strict=True))


class Predictor:
    """A model in evaluation mode on its device, with one engine for all slides.

    >>> predictor = Predictor.open("runs/first")       # doctest: +SKIP
    >>> predictor.predict("slide.svs").to_dict()       # doctest: +SKIP
    {'probability_normal': 0.03, 'probability_tumour': 0.97}
    """

    def __init__(self, run: Run) -> None:
        """Move the run's model to the device and precision that the run's config names.

        Args:
            run: The run, whose `loaded` is the model with its settings.
        """
        self.run = run
        self.loaded: Loaded = run.loaded
        model, _, config = self.loaded
        self.device = device_of(config)
        if self.device.type == "cpu" and config.accelerator in ("cuda", "gpu"):
            raise UserError(f"train.accelerator is {config.accelerator}, and there is no such device; set it to auto")
        self._dtype, self._autocast = _dtypes(precision_of(config))
        model.eval().to(dtype=self._dtype)
        self._network = _network(model, config, self.device)
        budget = self._network.engine.options.budget if isinstance(self._network, TiledModule) else None
        size = sum(parameter.nbytes for parameter in model.parameters())
        if budget is None or self.device.type == "cpu" or size < budget:
            model.to(self.device)
        else:  # plans stream its parameters
            for buffer in model.buffers():
                buffer.data = buffer.data.to(self.device)

    @classmethod
    def open(cls, path: str | Path, checkpoint: str = "best", trust: bool = False) -> Self:
        """Open the model of a run; a folder that may only be read is enough.

        Args:
            path: The folder of the run.
            checkpoint: best, last, or the path of another one.
            trust: Whether the config may name classes and functions beyond this package.
        """
        return cls(Run.open(path, checkpoint, trust=trust))

    def predict(self, slide: str | Path) -> Prediction:
        """The prediction of one slide.

        Raises:
            SlideError: The slide cannot be read, whatever `data.on_error` says.
        """
        (record,) = self.run.as_seen([self.run.record_of(Path(slide), Path(slide).name)])
        (prediction,) = self.predict_all([record])
        return prediction

    def predict_all(self, records: Sequence[SlideRecord]) -> Iterator[Prediction]:
        """The predictions of slides, or of patients with `data.group`, one after the other."""
        model, data, config = self.loaded
        cases = grouped(data, records, None)
        slides = SlideDataset(cases, None, data, image_of(config), None, model.tissue_stride)
        for batch in in_order(slides, 0):
            with self._precision(), torch.no_grad():
                values: Tensor = self._network(_moved(batch, self.device))
            yield Prediction(batch["slide"], model.task.names, values[0].double().cpu().numpy())

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """The default type of new tensors, and autocast, as the Trainer sets them."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast):
                yield
        finally:
            torch.set_default_dtype(before)


class Predicted(nn.Module):
    """The prediction of a batch."""

    def __init__(self, model: SlideModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: SlideBatch) -> Tensor:
        return self.model.predicted(batch)


def _network(model: SlideModel, config: TrainConfig, device: torch.device) -> nn.Module:
    """The model's prediction, tile by tile where the config has a budget."""
    predicted = Predicted(model)
    if config.budget is None:
        return predicted
    budget = default_budget(device) if config.budget == AUTO else config.budget
    try:
        return TiledModule(predicted, budget=budget, **engine_options(config))
    except (ValueError, OverflowError) as error:
        raise UserError(f"train.budget: {error}") from error


def _moved(batch: SlideBatch, device: torch.device) -> SlideBatch:
    moved = {
        key: [one.to(device) for one in value] if isinstance(value, list) else value.to(device)
        for key, value in batch.items()
        if isinstance(value, list | Tensor)
    }
    return {**batch, **moved}  # type: ignore[typeddict-item]


def _dtypes(precision: str) -> tuple[torch.dtype, torch.dtype | None]:
    """The type of parameters, and that of autocast where the precision is mixed."""
    bits, _, how = precision.partition("-")
    if bits not in DTYPES or how not in ("true", "mixed"):
        raise UserError(f"train.precision is {precision!r}; a prediction needs 32-true, 64-true, bf16-mixed or alike")
    return (torch.float32, DTYPES[bits]) if how == "mixed" else (DTYPES[bits], None)
