"""Settings of the demo, chosen so that two cores need a few minutes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wsi_trainer.errors import UserError

SPLITS = {"train": 0.4, "val": 0.1, "test": 0.5}
"""As many held out as trained on: an interval from a dozen patients would say little."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The options of `wsi-train demo`."""

    out: Path
    seed: int
    slides: int
    side: int
    epochs: int
    budget: str | None
    thumbnail: int = 8
    """Factor by which a thumbnail is shrunk in each direction."""

    def __post_init__(self) -> None:
        if self.slides < 20:
            raise UserError(f"--slides is {self.slides}; the demo needs at least 20 to train and to compare two models")
        if self.side < 256:
            raise UserError(f"--side is {self.side}; the demo needs slides of at least 256 pixels")
        if self.epochs < 1:
            raise UserError(f"--epochs is {self.epochs}; it must be 1 or more")

    def made_from(self) -> dict[str, Any]:
        """The settings that decide the slides: with equal ones slides of an earlier demo are used again."""
        return {key: value for key, value in asdict(self).items() if key in ("seed", "slides", "side")}

    def run_options(self, name: str) -> dict[str, Any]:
        """The config of one of the two runs, as `wsi-train fit --config` reads it."""
        full = name == "full"
        return {
            "out": str(self.out / "runs" / name),
            "model": {
                "backbone": {
                    "class_path": "wsi_trainer.models.VGG",
                    "init_args": {"widths": [12, 24, 32], "convs": 1, "stem_stride": 2, "norm": "weight"},
                },
                "head": {"class_path": "wsi_trainer.models.GeneralisedMeanPooling"},
                "task": {"class_path": "wsi_trainer.models.BinaryTask"},
                "learning_rate": 0.003,
            },
            "data": {
                "manifest": str(self.out / "slides" / "manifest.csv"),
                "stores": str(self.out / "zarr"),
                "downsample": 1 if full else self.thumbnail,
            },
            "train": {
                "epochs": self.epochs if full else 5 * self.epochs,
                "seed": self.seed,
                "budget": self.budget if full else None,
            },
        }
