"""Training of a run: the keys under `train` in a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from wsi_trainer.errors import UserError

if TYPE_CHECKING:
    from wsi_trainer.data.dataset import DataConfig
    from wsi_trainer.models import SlideModel

AUTO = "auto"
Halo = Literal["auto", "recompute", "share", "split", "stochastic_split"]
Compile = Literal["never", "tiles", "graphs"]
Tracker = Literal["csv", "tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length and speed of the training, and the memory that it keeps within."""

    epochs: int = 10
    """Times that each slide is seen."""
    accumulate: int = 1
    """Slides whose gradients are averaged for one step of the optimizer, on each device."""
    clip: float = 1.0
    """Largest norm of the gradient of a step; 0 does not clip."""
    seed: int = 0
    """Decides initial weights, splits left open, order and orientations."""
    budget: str | None = AUTO
    """Device memory for a step, as "512MiB" or "8GiB", by tile-by-tile execution; auto takes most of what is free on
    the device, or half of the machine's memory without one; null runs plain PyTorch, which holds whole slides.
    """
    halo: Halo = "auto"
    """What tiles do about the rows between them. Exact: auto, recompute, share. Approximations: split trains with
    windows that see nothing beyond their split of the slide, stochastic_split cuts it at other places in each step.
    """
    split_grid: int | None = None
    """Into how many splits each side of a slide is cut, with `halo` split or stochastic_split."""
    split_depth: float | str = 0.5
    """Up to where: a share of the convolutions and poolings, or the path of a module."""
    split_jitter: float = 0.2
    """How far stochastic_split moves a cut at most, as a part of a split's side, below 0.5."""
    compile: Compile = "never"
    """Whether tiles that come often are compiled: never, tiles (torch.compile, some seconds for each kind of tile), or
    graphs (as CUDA graphs besides).
    """
    trim: bool = True
    """Whether the process gives freed memory back to the system where it keeps much more than the budget, on a CPU."""
    precision: str = AUTO
    """Precision of the Trainer: 32-true, bf16-mixed, 64-true, ...; auto is bf16-mixed on a GPU that has it, else
    32-true.
    """
    accelerator: str = AUTO
    """Device of the Trainer: auto, cpu, cuda."""
    devices: int = 1
    """How many devices; with more than one each slide is worked on by one of them, and gradients are averaged."""
    monitor: str = "val_loss"
    """Which number of the validation slides chooses the best checkpoint: val_loss, or `val_` and a task's score."""
    patience: int | None = None
    """Stop after this many epochs without a better `monitor`; without it all epochs run."""
    checkpoint_every: int = 25
    """Steps of the optimizer between two writes of last.ckpt, from which `--resume last` continues; it is written
    after each epoch too, and with 0 only then.
    """
    loggers: tuple[Tracker, ...] = ("csv", "tensorboard")
    """Where curves go: csv, tensorboard, wandb, mlflow; the last two are extras to be installed."""
    resamples: int = 1000
    """Resamples of the patients from which the intervals of scores are taken."""

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "devices", "resamples"):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name} is {getattr(self, name)}; it must be 1 or more")
        if not 0 <= self.clip < float("inf"):
            raise UserError(f"train.clip is {self.clip}; it must be 0 (off) or positive")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"train.seed is {self.seed}; it must be from 0 to {2**32 - 1}")
        if self.checkpoint_every < 0:
            raise UserError(f"train.checkpoint_every is {self.checkpoint_every}; it must be 0 or positive")
        if self.patience is not None and self.patience < 1:
            raise UserError(f"train.patience is {self.patience}; it must be 1 or more, or null for none")
        if (self.split_grid is None) == ("split" in self.halo):
            raise UserError(
                f"train.halo is {self.halo} and train.split_grid is {self.split_grid}; give split_grid, such as 2, "
                "with split or stochastic_split, and with no other halo"
            )
        if self.split_grid is not None and self.split_grid < 2:
            raise UserError(f"train.split_grid is {self.split_grid}; it must be 2 or more, or null for none")
        if not isinstance(self.split_depth, str) and not 0 < self.split_depth <= 1:
            raise UserError(f"train.split_depth is {self.split_depth}; it must be above 0 and at most 1, or a path")
        if not 0 <= self.split_jitter < 0.5:
            raise UserError(f"train.split_jitter is {self.split_jitter}; it must be 0 or more and below 0.5")
        for name, unset in (("halo", "auto"), ("compile", "never")):
            if self.budget is None and (said := getattr(self, name)) != unset:
                raise UserError(f"train.{name} is {said}, which needs tile-by-tile execution: give train.budget")
        if self.devices > 1 and self.budget is None:
            raise UserError(f"train.devices is {self.devices}, which needs tile-by-tile execution: give train.budget")


class Loaded(NamedTuple):
    """The parts of a run, as its config says them."""

    model: SlideModel
    data: DataConfig
    train: TrainConfig
