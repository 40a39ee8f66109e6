"""Cost of `wsi-train embed` beside decoding and the encoder alone, its memory, and its files after kills.

    python -m benchmarks.embed speed --work DIR [--patches 500]
    python -m benchmarks.embed memory --work DIR [--sizes 200 800]
    python -m benchmarks.embed kills --work DIR [--kills 20]

- ``speed``: processor seconds of the embedder, and of reading the same patches and encoding them one after the other in
  the same batches with nothing else; the median of three turns of each, by turns.
- ``memory``: the most resident memory of a process that embeds one slide, for slides of so many patches.
- ``kills``: a process that embeds is killed (SIGKILL) at a random moment and started again, so many times; the files
  are compared byte by byte with those of work that was left alone.

A ResNet of widths 32, 64 and 128 over patches of 224 stands for the encoder. Writes
benchmarks/results/embed.json, a case for each.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.keep import keep_case
from lightning_plugin import Box
from wsi_trainer.data.dataset import DataConfig
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.data.patches import PatchConfig, open_bag
from wsi_trainer.embed import Embedder
from wsi_trainer.fit.config import Loaded, TrainConfig
from wsi_trainer.fit.predictor import Predictor
from wsi_trainer.models import PatchEncoder, ResNet, SlideClassifier
from wsi_trainer.slide.slide import Slide
from wsi_trainer.synthetic import SlideSpec, write_slide

WIDTHS = (32, 64, 128)
SIZE, BATCH = 224, 32
TISSUE = 0.85
PATCHES = PatchConfig(size=SIZE)
MEASURED = """
import resource, sys
from wsi_trainer.cli import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


def slide_of(work: Path, patches: int) -> Path:
    """A synthetic slide with about so many patches of tissue."""
    work.mkdir(parents=True, exist_ok=True)
    side = math.ceil(math.sqrt(patches / TISSUE)) * SIZE
    path = work / f"slide-{side}.tif"
    if not path.is_file():
        write_slide(path, SlideSpec(side, side, seed=5, tissue=TISSUE))
    return path


def network() -> SlideClassifier:
    torch.manual_seed(0)
    return SlideClassifier(backbone=PatchEncoder(ResNet(WIDTHS, norm="group"), SIZE)).eval()


def config_of(work: Path, slides: list[Path]) -> Path:
    """A config for the command, and the weights that it names."""
    model = network()
    assert isinstance(model.backbone, PatchEncoder)
    torch.save(model.backbone.network.state_dict(), work / "encoder.pt")
    (work / "manifest.csv").write_text("\n".join(["slide", *(str(slide.resolve()) for slide in slides)]) + "\n")
    inner = {"class_path": "wsi_trainer.models.ResNet", "init_args": {"widths": list(WIDTHS), "norm": "group"}}
    encoder = {"class_path": "wsi_trainer.models.PatchEncoder", "init_args": {"size": SIZE, "network": inner}}
    content = {
        "model": {"backbone": encoder, "pretrained": str(work / "encoder.pt")},
        "data": {"manifest": str(work / "manifest.csv"), "patches": {"size": SIZE}},
        "train": {"accelerator": "cpu", "precision": "32-true"},
    }
    path = work / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def alone(model: SlideClassifier, slide: Path) -> int:
    """Read and encode all patches, and do nothing else; returns how many."""
    bag = open_bag(Slide.open(slide), PATCHES)
    for start in range(0, bag.shape[0], BATCH):
        patches = bag.read(Box((start, 0, 0), (min(start + BATCH, bag.shape[0]), SIZE, SIZE)))
        with torch.inference_mode():
            model.backbone(model.normalise(patches))
    bag.close()
    return bag.shape[0]


def speed(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    slide, model = slide_of(options.work, options.patches), network()
    record = SlideRecord("slide", slide, "", "", "")
    turns: dict[str, list[float]] = {"embed": [], "alone": []}
    count = alone(model, slide)  # warms the page cache
    for number in range(3):
        out = options.work / f"speed-{time.time_ns()}-{number}"
        out.mkdir()
        began = time.process_time()
        predictor = Predictor(
            Loaded(model, DataConfig(manifest=out, patches=PATCHES), TrainConfig(precision="32-true"))
        )
        list(Embedder(predictor, PATCHES, out, "trident", BATCH).embed([record]))
        turns["embed"].append(time.process_time() - began)
        began = time.process_time()
        alone(model, slide)
        turns["alone"].append(time.process_time() - began)
    middle = {name: statistics.median(seconds) for name, seconds in turns.items()}
    row = {"patches": count, "processor_seconds": turns, "speed": middle["alone"] / middle["embed"]}
    print(row)
    keep_case("embed", "speed", row)


def memory(options: argparse.Namespace) -> None:
    rows = []
    for patches in options.sizes:
        slide = slide_of(options.work, patches)
        config, out = config_of(options.work, [slide]), options.work / f"memory-{time.time_ns()}"
        words = [sys.executable, "-c", MEASURED, "embed", f"--config={config}", f"--out={out}", f"--batch={BATCH}"]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        pixels = int(slide.stem.partition("-")[2]) ** 2
        rows.append({"slide_pixels": pixels, "process_peak_bytes": int(done.stdout.splitlines()[-1])})
        print(rows[-1], flush=True)
    keep_case("embed", "memory", {"rows": rows})


def kills(options: argparse.Namespace) -> None:
    slides = [slide_of(options.work, patches) for patches in (60, 120)]
    config = config_of(options.work, slides)
    words = [sys.executable, "-m", "wsi_trainer", "embed", f"--config={config}", "--batch=4"]
    whole, often = (options.work / f"{name}-{time.time_ns()}" for name in ("whole", "often"))
    began = time.perf_counter()
    subprocess.run([*words, f"--out={whole}"], check=True, capture_output=True)
    seconds = time.perf_counter() - began
    draw, killed, restarts = random.Random(0), 0, 0
    while killed < options.kills:
        process = subprocess.Popen([*words, f"--out={often}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(draw.uniform(0.3, 1.0) * seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
            continue
        restarts += 1  # it was done: from the beginning
        for path in often.iterdir():
            path.unlink()
    subprocess.run([*words, f"--out={often}"], check=True, capture_output=True)
    same = {path.name: path.read_bytes() == (often / path.name).read_bytes() for path in whole.glob("*.h5")}
    left = sorted(path.name for path in often.iterdir() if path.name not in same)
    row: dict[str, Any] = {"kills": killed, "from_the_beginning": restarts, "identical": same, "left_behind": left}
    print(json.dumps(row))
    keep_case("embed", "kills", row)


PARTS = {f.__name__: f for f in (speed, memory, kills)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--work", type=Path, required=True, help="folder for slides and features")
    parser.add_argument("--patches", type=int, default=500)
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 800])
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
