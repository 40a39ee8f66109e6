"""Small slides as bags, and training on them by plain PyTorch with the whole bag in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor

from wsi_trainer.data.datamodule import EpochSampler
from wsi_trainer.models import SlideClassifier
from wsi_trainer.models.finetune import warmup_cosine
from wsi_trainer.store.convert import Job, Settings, convert
from wsi_trainer.synthetic import SlideSpec, write_slide

SIZE, STRIDE, SHARE = 32, 28, 0.3
VIT = "timm:vit_tiny_patch16_224"
SPLITS = ("train", "train", "train", "val", "val", "test", "test")
TRAINED_ON = SPLITS.count("train")


def resnet(*widths: int) -> dict[str, Any]:
    """A small ResNet as the encoder of patches, as a config has it."""
    network = {"class_path": "wsi_trainer.models.ResNet", "init_args": {"widths": [*widths], "norm": "group"}}
    return {"class_path": "wsi_trainer.models.PatchEncoder", "init_args": {"size": SIZE, "network": network}}


def vit(size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A ViT of timm as the encoder of patches, as a config has it."""
    inner = {"network": VIT, "size": size, "arguments": arguments}
    return {"class_path": "wsi_trainer.models.PatchEncoder", "init_args": inner}


def write_stores(folder: Path) -> Path:
    """Seven small slides, as stores, and their manifest."""
    lines = ["slide,label,split"]
    for number, split in enumerate(SPLITS):
        spec = SlideSpec(190 + 10 * number, 230, seed=2, slide=number, patient=number, positive=bool(number % 2))
        write_slide(folder / f"s{number}.tif", spec)
        convert(Job(folder / f"s{number}.tif", f"s{number}"), folder, Settings(chunk=64, shard=256))
        lines.append(f"s{number}.zarr,{number % 2},{split}")
    (folder / "manifest.csv").write_text("\n".join(lines) + "\n")
    return folder


def whole_bag(store: Path, size: int = SIZE, stride: int = STRIDE, share: float = SHARE) -> Tensor:
    """All patches of a slide in memory, in the order of the rows."""
    pixels = zarr.open_array(store / "0", mode="r")[:]
    tissue = zarr.open_array(store / "labels" / "tissue" / "0", mode="r")[:]
    found = []
    for y in range(0, pixels.shape[1] - size + 1, stride):
        for x in range(0, pixels.shape[2] - size + 1, stride):
            if (tissue[y : y + size, x : x + size] > 0).mean() >= share:
                found.append(pixels[:, y : y + size, x : x + size])
    return torch.from_numpy(np.stack(found))


def train_whole(model: SlideClassifier, bags: list[Tensor], labels: list[int], epochs: int, rate: float) -> None:
    """What a fit of so many epochs does with its own defaults, written out."""
    learnt = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([
        {"params": [p for p in learnt if p.ndim >= 2], "weight_decay": 1e-4},
        {"params": [p for p in learnt if p.ndim < 2], "weight_decay": 0.0},
    ], lr=rate)  # fmt: skip
    steps = len(bags) * epochs
    schedule = warmup_cosine(optimizer, steps, round(0.05 * steps))
    sampler = EpochSampler(len(bags), 0)
    for _ in range(epochs):
        for visit in sampler:
            optimizer.zero_grad()
            loss = model.task.loss(model(bags[visit.slide]), torch.tensor([labels[visit.slide]]))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learnt, 1.0)
            optimizer.step()
            schedule.step()
