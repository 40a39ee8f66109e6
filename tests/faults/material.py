"""What the runs work on: slides, stores, and a run that was cut short."""

from __future__ import annotations

import shutil
from pathlib import Path

SPLITS = {"train": 0.34, "val": 0.33, "test": 0.33}


def make(words: list[str]) -> int:
    """Six slides of 128 pixels, two of them alone, two as stores, and the config of an encoder."""
    import torch
    import yaml

    from wsi_trainer.models import ResNet
    from wsi_trainer.slides.convert import Job, convert
    from wsi_trainer.slides.settings import Settings
    from wsi_trainer.synthetic import generate

    now = Path(words[0])
    folder = now / "in"
    (now / "out").mkdir()
    generate(folder / "slides", slides=6, seed=1, splits=SPLITS, workers=1, shape=(128, 128))
    two, stores = folder / "two", folder / "stores"
    two.mkdir()
    slides = sorted((folder / "slides").rglob("*.tif"))[:2]
    for slide in slides:
        shutil.copy(slide, two / slide.name)
        convert(Job(two / slide.name, slide.stem), stores, Settings(chunk=64, shard=64))
    shutil.rmtree(stores / ".staging", ignore_errors=True)
    (stores / "manifest.csv").write_text("slide\n" + "".join(f"{slide.stem}.zarr\n" for slide in slides))
    torch.manual_seed(3)
    torch.save(ResNet((4, 8), norm="group").state_dict(), folder / "encoder.pt")
    network = {"class_path": "wsi_trainer.models.ResNet", "init_args": {"widths": [4, 8], "norm": "group"}}
    encoder = {"class_path": "wsi_trainer.models.PatchEncoder", "init_args": {"size": 32, "network": network}}
    content = {
        "model": {"backbone": encoder, "pretrained": str(folder / "encoder.pt")},
        "data": {"manifest": str(stores / "manifest.csv"), "patches": {"size": 32, "min_tissue": 0.1}},
        "train": {"accelerator": "cpu", "precision": "32-true"},
    }
    (folder / "embed.yaml").write_text(yaml.safe_dump(content))
    return 0


def cut_short(words: list[str]) -> int:
    """A run that is killed after its first step: it has a checkpoint."""
    from wsi_trainer.cli import main
    from wsi_trainer.fit.checkpoints import StepCheckpoint

    write = StepCheckpoint.on_train_batch_end

    class Killed(KeyboardInterrupt):
        """Like a kill: the command does not go on."""

    def and_die(self: StepCheckpoint, *args: object, **kwargs: object) -> None:
        write(self, *args, **kwargs)  # type: ignore[arg-type]
        if self._written:
            raise Killed

    StepCheckpoint.on_train_batch_end = and_die  # type: ignore[method-assign]
    return 0 if main(words) else 1
