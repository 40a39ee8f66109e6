"""A run in a program: its folder, its model, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from wsi_trainer.data.cohort import read_headers
from wsi_trainer.data.manifest import SlideRecord, check_files, read_manifest
from wsi_trainer.fit.folder import RunFolder

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn

    from wsi_trainer.fit.config import Loaded
    from wsi_trainer.fit.predictor import Attention, Predictor
    from wsi_trainer.metrics import Predictions


@dataclass(frozen=True, repr=False)
class Run(RunFolder):
    """A run.

    >>> run = Run.open("runs/first")             # doctest: +SKIP
    >>> run.predict("slide.svs")                 # doctest: +SKIP
    {'probability_normal': 0.03, 'probability_tumour': 0.97}
    """

    # Its model: modules that import torch are imported when it is asked for.

    @cached_property
    def loaded(self) -> Loaded:
        """The model with the weights of the checkpoint, in evaluation mode, and the settings of data and training."""
        from wsi_trainer.fit.config import load

        return load(self, self.trust)

    def holding(self, loaded: Loaded) -> Self:
        """The run with a model that is in memory already; its weights become those of the checkpoint."""
        from wsi_trainer.models.weights import load_weights

        load_weights(loaded.model, self.checkpoint())
        loaded.model.eval()
        other = replace(self)
        vars(other)["loaded"] = loaded
        return other

    @cached_property
    def predictor(self) -> Predictor:
        """The model on its device, with one engine for all slides."""
        from wsi_trainer.fit.predictor import Predictor

        return Predictor(self.loaded, self)

    def records_in(self, manifest: Path | DataFrame, root: Path | None = None, **how: Any) -> list[SlideRecord]:
        """The slides of another manifest, read from stores where the run reads stores.

        Args:
            manifest: The manifest, or a table with its columns.
            root: Where its relative paths start.
            how: Further arguments of `read_manifest`.
        """
        data = self.loaded.data
        stores = data.stores if data.features is None else None
        records = read_manifest(manifest, root, stores=stores, **how)
        if data.features is None:
            check_files(records)
        return records

    def as_seen(self, records: Sequence[SlideRecord], tell: bool = True) -> list[SlideRecord]:
        if self.seen is None and tell and self.loaded.data.features is None:
            read_headers(records)
        return super().as_seen(records, tell)

    @property
    def encoder(self) -> nn.Module:
        """The trained backbone, or the network within it that encodes patches, in evaluation mode."""
        from wsi_trainer.models.weights import encoder_of

        return encoder_of(self.loaded.model.backbone)

    @overload
    def predict(self, slides: str | Path, covariates: Mapping[str, object] | None = None) -> dict[str, float]: ...

    @overload
    def predict(self, slides: Sequence[str | Path] | DataFrame) -> DataFrame: ...

    def predict(
        self, slides: str | Path | Sequence[str | Path] | DataFrame, covariates: Mapping[str, object] | None = None
    ) -> dict[str, float] | DataFrame:
        """The prediction of a slide: a number for each name in the columns of `wsi-train predict`; a table of several.

        Nothing is written into the folder of the run.

        Args:
            slides: A slide, or several, or a table of them as a manifest has it, whose labels are not looked at.
            covariates: Of one slide the cells of `model.covariates`, which a table has as columns.

        Raises:
            SlideError: A slide cannot be read, whatever `data.on_error` says.
        """
        if isinstance(slides, str | Path):
            return self.predictor.predict(slides, covariates).to_dict()
        if covariates is not None:
            raise ValueError("covariates are of one slide; of several give a table with their columns")
        from wsi_trainer.data.dataset import grouped
        from wsi_trainer.io.frames import frame, is_frame

        if is_frame(slides):
            records = self.records_in(slides, self.data_root, labelled=False)
        else:
            records = [self.predictor.record_of(slide) for slide in slides]
        cases = grouped(self.loaded.data, self.as_seen(records), None)
        return frame(self.predictor.columns(cases, [one.values for one in self.predictor.predict_all(cases)]))

    # What a notebook shows; tables need pandas.

    def __repr__(self) -> str:
        from wsi_trainer.notebook import RunCard

        return RunCard(self).text

    def _repr_html_(self) -> str:
        from wsi_trainer.notebook import RunCard

        return RunCard(self).html

    @property
    def slides(self) -> DataFrame:
        """The slides that the run, or its cohort, keeps: a row for each, with its split."""
        from wsi_trainer.notebook import slides_of

        return slides_of(self.kept())

    def predictions(self, split: str = "test") -> DataFrame:
        """The predictions of the slides of a split: a row for each, beside its label."""
        from wsi_trainer.metrics import read_predictions

        return read_predictions(self.predictions_file(split)).to_frame()

    def test(self, cohort: str | Path | DataFrame, name: str, overwrite: bool = False) -> Run:
        """Score a cohort as `wsi-train test --cohort` does, without slides of training; the run with its results.

        Args:
            cohort: A manifest, or a table with its columns.
            name: What the cohort is called: its results are in `cohorts/NAME`.
            overwrite: Whether to replace results that are there.
        """
        from wsi_trainer.fit.scoring import tested

        return tested(self, cohort, name, overwrite)

    def attention(self, slide: str | Path) -> Attention:
        """The weight that the head gives each position of a slide, with its place: `Slide.plot` draws it.

        Raises:
            UserError: The head has no attention.
        """
        return self.predictor.predict(slide).attention

    def compare(self, other: Run | Predictions, split: str = "test") -> DataFrame:
        """The scores of both runs on the slides that both have predicted, their differences and 95 % intervals.

        Args:
            other: The other run; or predictions of patients, such as `wsi_trainer.neighbours.read_stamp` reads: then
                those of the run are taken by patient.
            split: Which slides.
        """
        from wsi_trainer.metrics import read_predictions
        from wsi_trainer.notebook import compared

        first = read_predictions(self.predictions_file(split))
        if not isinstance(other, Run):
            return compared(first.by_patient(), other, (self.name, "other"))
        names = (self.name, other.name) if self.name != other.name else (str(self.path), str(other.path))
        return compared(first, read_predictions(other.predictions_file(split)), names)
