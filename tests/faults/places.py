"""The folder of a run, and what is there before a run begins: made once, copied for each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

COMMON = (
    "--model.backbone=wsi_trainer.models.VGG", "--model.backbone.widths=[4,8]", "--model.backbone.convs=1",
    "--train.accelerator=cpu", "--train.resamples=5",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """The folders of a run. All its files are below `now`, whose name is the same for every run."""

    base: Path

    @property
    def now(self) -> Path:
        return self.base / "now"

    @property
    def temporary(self) -> Path:
        return self.now / "tmp"

    @property
    def environment(self) -> dict[str, str]:
        """What a run is told of places."""
        return {
            "TMPDIR": str(self.temporary),
            "LIGHTNING_PLUGIN_CACHE": str(self.now / "cache"),
            "HOME": str(self.now / "home"),
            "MPLCONFIGDIR": str(self.base / "matplotlib"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "400",
        }

    def keep(self, name: str) -> None:
        """What is there now is what `bring` brings."""
        shutil.rmtree(self.base / name, ignore_errors=True)
        shutil.copytree(self.now, self.base / name, symlinks=True)

    def bring(self, name: str) -> None:
        """The state that was kept, and nothing else."""
        shutil.rmtree(self.now, ignore_errors=True)
        shutil.copytree(self.base / name, self.now, symlinks=True)

    def begin(self) -> None:
        """Empty folders."""
        shutil.rmtree(self.now, ignore_errors=True)
        for name in ("tmp", "cache", "home"):
            (self.now / name).mkdir(parents=True)


Make = Callable[[Place], None]
