"""Small slides as bags, and training on them by plain PyTorch with the whole bag in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
import zarr
from torch import Tensor

from wsi_trainer.data.datamodule import EpochSampler
from wsi_trainer.fit.run import Run
from wsi_trainer.metrics import ClassPredictions
from wsi_trainer.models import SlideClassifier
from wsi_trainer.models.finetune import warmup_cosine
from wsi_trainer.store.convert import Job, Settings, convert
from wsi_trainer.synthetic import SlideSpec, write_slide

SIZE, STRIDE, SHARE, RATE = 32, 79, 0.3, 0.01
"""Nine patches of each slide are tissue, so that one plan serves all."""
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


def write_config(
    folder: Path, manifest: Path, backbone: dict[str, Any], *, patches: dict[str, Any],
    data: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **model: Any,
) -> Path:  # fmt: skip
    """A config of a run on bags in a folder."""
    content = {
        "out": str(folder / "run"),
        "model": {"backbone": backbone, "head": "wsi_trainer.models.AttentionPooling", **model},
        "data": {"manifest": str(manifest), "patches": {"size": SIZE, **patches}, **(data or {})},
        "train": {"epochs": 1, "accelerator": "cpu", "resamples": 20, "loggers": ["csv"], **(train or {})},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


def write_exact(folder: Path, manifest: Path, backbone: dict[str, Any], epochs: int, **more: Any) -> Path:
    """A config in double precision whose slides are shown as they are."""
    patches = {"stride": STRIDE, "flip_rotate": False, **more.pop("patches")}
    data, train = {"flip_rotate": False, **more.pop("data", {})}, {"epochs": epochs, "precision": "64-true"}
    return write_config(folder, manifest, backbone, patches=patches, data=data, train=train, learning_rate=RATE, **more)


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


def train_whole(model: SlideClassifier, bags: list[Tensor], labels: list[int], epochs: int) -> None:
    """Train as a fit of so many epochs does with its own defaults, written out."""
    learnt = [p for p in model.train().parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([
        {"params": [p for p in learnt if p.ndim >= 2], "weight_decay": 1e-4},
        {"params": [p for p in learnt if p.ndim < 2], "weight_decay": 0.0},
    ], lr=RATE)  # fmt: skip
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


def assert_trained_alike(run: Run, model: SlideClassifier) -> None:
    """The last checkpoint of a run has the weights of the model."""
    trained = torch.load(run.checkpoint("last"), weights_only=True)["state_dict"]
    for name, value in model.state_dict().items():
        if name != "seen":
            torch.testing.assert_close(trained[name].double(), value.double(), rtol=1e-8, atol=1e-8, msg=name)


def assert_predicted_alike(run: Run, model: SlideClassifier, bags: list[Tensor]) -> ClassPredictions:
    """The predictions of a run are those of its best checkpoint for bags in memory."""
    model.load_state_dict(torch.load(run.checkpoint("best"), weights_only=True)["state_dict"])
    with torch.no_grad():
        said = torch.cat([model.task.predict(model.eval()(bag)) for bag in bags])
    predicted = ClassPredictions.read(run.predictions_file("test"))
    np.testing.assert_allclose(predicted.probabilities, said.numpy(), atol=1e-8)
    return predicted
