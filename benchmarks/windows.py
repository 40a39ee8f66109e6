"""The window audit: `python -m benchmarks.windows SLIDE [--threads 2] [--budget 256MiB]`.

How much of a result does the size of the window decide? SHELL (`pip install lavlab-shell onnx`; MIT) is a trained
network that finds lumina and epithelium on stained tissue, with 25 group norms. Its authors run it by windows of 1024²
that overlap by half, with Gaussian blending. Here the same weights run on the whole picture, by
`lightning_plugin.infer`, and by windows of several sizes, by the function of MONAI's that the authors call. The stains
are prepared by the authors' code. Counted are the pixels of tissue, by the authors' mask, that have another class than
in the whole. Which is nearer to the truth is not measured: there are no outlines. The slide is OpenSlide's
CMU-1-Small-Region.svs (CC0). Its halves are each run whole, too, as if the scan had ended between them.

Writes benchmarks/results/windows.json and, if all cases were run, docs/figures/windows.png. Cases that are there are
not run again. Two more benchmarks go with it: `benchmarks.window_training` trains on windows and on whole images, and
`benchmarks.window_networks` runs other networks both ways.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.keep import FIGURES, keep_case
from lightning_plugin import Box, TiledModule, infer
from tests.conftest import RESULTS
from wsi_trainer import Slide
from wsi_trainer.slide.views import Image

#: Micrometres of a pixel; side and overlap of windows. The first of 1 µm is the authors' own.
CASES = ((1.0, 1024, 0.5), (1.0, 1024, 0.0), (1.0, 512, 0.5), (2.0, 512, 0.5), (2.0, 256, 0.5))
#: The authors' multiple to which the picture is padded.
MULTIPLE = 64
#: The name of a result: the parts of the picture.
SHARES = "lumen or glass, epithelium, other"
Classes = NDArray[np.uint8]


class Shell(nn.Module):
    """SHELL's network, read from its ONNX file."""

    def __init__(self, path: Path) -> None:
        import onnx

        super().__init__()
        graph = onnx.load(path).graph
        for tensor in graph.initializer:
            value = onnx.numpy_helper.to_array(tensor)
            if value.dtype == np.float32:
                self.register_buffer(tensor.name.replace(".", "_"), torch.from_numpy(value.copy()))
        self.steps = [
            (n.op_type, [i.replace(".", "_") for i in n.input], n.output[0],
             {a.name: onnx.helper.get_attribute_value(a) for a in n.attribute})
            for n in graph.node
        ]  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        known: dict[str, Any] = {"input": x}
        last = x
        for kind, inputs, output, how in self.steps:
            values: list[Any] = [known[i] if i in known else getattr(self, i, None) for i in inputs]
            a, *rest = values
            if kind == "Conv":
                weight, bias = (*rest, None)[:2]
                last = F.conv2d(a, weight, bias, stride=how["strides"], padding=how["pads"][:2])
            elif kind == "InstanceNormalization":  # of channels in groups, which were reshaped before and are after
                last = F.group_norm(a, len(rest[0]), eps=how["epsilon"])
            elif kind == "Resize":
                last = F.interpolate(a, scale_factor=2.0, mode="bilinear")
            elif kind == "Mish":
                last = F.mish(a)
            elif kind in ("Add", "Mul"):
                last = a + rest[0] if kind == "Add" else a * rest[0]
            else:
                assert kind in ("Reshape", "Shape"), kind
                last = a
            known[output] = last
        return last


def stains(slide: Path, mpp: float) -> tuple[Tensor, NDArray[np.bool_]]:
    """Eosin, haematoxylin and optical density, (1, 3, height, width), for the network; and where tissue is."""
    from shell.transforms import apply_eho_chunked, detect_background, estimate_stain_params

    with Slide.open(slide) as opened:
        view = Image(opened, mpp=mpp)
        rgb = view.read(Box.whole(view.shape[2:]))[0].permute(1, 2, 0).contiguous().numpy()
    background = detect_background(rgb)
    eho = torch.from_numpy(apply_eho_chunked(rgb, **estimate_stain_params(rgb, background))).permute(2, 0, 1).float()
    low, high = eho.amin((1, 2), keepdim=True), eho.amax((1, 2), keepdim=True)
    return ((eho - low) / (high - low))[None], ~background


def padded(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The picture padded as the authors do it, and the way back."""
    height, width = x.shape[2:]
    rows, columns = -height % MULTIPLE, -width % MULTIPLE
    top, left = rows // 2, columns // 2
    larger = F.pad(x, (left, columns - left, top, rows - top), "reflect")
    return larger, lambda y: y[:, :, top : top + height, left : left + width]


def classes_of(logits: Tensor) -> Classes:
    """The authors' rule: 1 lumen or glass, 2 epithelium, 0 other tissue."""
    inner, outer, background = logits[0].sigmoid()
    found = torch.zeros(inner.shape, dtype=torch.uint8)
    found[(outer > 0.5) & (outer > background)] = 2
    found[(inner > 0.5) & (inner > background)] = 1
    return found.numpy()


def shares(classes: Classes) -> list[float]:
    """The shares of the picture that are lumen or glass, epithelium, and other tissue."""
    counts = np.bincount(classes.ravel(), minlength=3) / classes.size
    return [float(counts[i]) for i in (1, 2, 0)]


def draw(path: Path, slide: Path, pictures: dict[str, Any]) -> None:
    """The slide, the classes of the whole, and where windows give another class."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    with Slide.open(slide) as opened:
        view = Image(opened, mpp=1.0)
        rgb = view.read(Box.whole(view.shape[2:]))[0].permute(1, 2, 0).numpy()
    figure, axes = plt.subplots(1, len(pictures) + 1, figsize=(3.2 * (len(pictures) + 1), 4.4), layout="constrained")
    axes[0].imshow(rgb)
    axes[0].set_title("slide, 1 µm a pixel", fontsize=9)
    for axis, (name, values) in zip(axes[1:], pictures.items(), strict=True):
        colours = ["#d9b38c", "#ffffff", "#7b3294"] if values.dtype == np.uint8 else ["#eeeeee", "#d7191c"]
        axis.imshow(values, cmap=ListedColormap(colours), interpolation="nearest", vmin=0, vmax=len(colours) - 1)
        axis.set_title(name, fontsize=9)
    for axis in axes:
        axis.axis("off")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def whole(net: nn.Module, image: Tensor, budget: str) -> tuple[Classes, dict[str, Any]]:
    """The classes of an image that is not cut, and what they took."""
    x, back = padded(image)
    logits, began = torch.zeros_like(x), time.process_time()
    tiled = TiledModule(net, budget=budget)
    infer(tiled, x, logits)
    seconds = time.process_time() - began
    return classes_of(back(logits)), {"processor seconds": seconds, "peak bytes": tiled.peak_bytes, "budget": budget}


def by_windows(net: nn.Module, image: Tensor, side: int, overlap: float) -> tuple[Classes, dict[str, Any]]:
    """The classes by windows, and what they took."""
    from monai.inferers import sliding_window_inference

    x, back = padded(image)
    began = time.process_time()
    with torch.no_grad():
        blend = "gaussian" if overlap else "constant"
        scores = sliding_window_inference(x, (side, side), 1, net, overlap=overlap, mode=blend)
    seconds = time.process_time() - began
    return classes_of(back(scores)), {"window": side, "overlap": overlap, "processor seconds": seconds}


def in_halves(net: nn.Module, image: Tensor, budget: str) -> tuple[Classes, dict[str, Any]]:
    """The classes of the upper and the lower half, each run whole, as if the scan had ended between them."""
    began = time.process_time()
    halves = [whole(net, half, budget)[0] for half in image.chunk(2, 2)]
    return np.concatenate(halves), {"halves": 2, "processor seconds": time.process_time() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slide", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", default="256MiB")
    parser.add_argument("--again", action="store_true", help="run cases that are there, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = RESULTS / "windows.json"
    known = json.loads(path.read_text())["cases"] if path.exists() and not options.again else {}
    spec = find_spec("shell")
    assert spec is not None and spec.origin is not None, "pip install lavlab-shell onnx"
    net = Shell(Path(spec.origin).parent / "weights" / "model_v1.onnx").eval()
    pictures: dict[str, Any] = {}
    for mpp in dict.fromkeys(mpp for mpp, _, _ in CASES):
        sides = [(side, overlap) for its, side, overlap in CASES if its == mpp]
        names = {
            f"{mpp:g} µm, windows of {s}², overlap {o:g}": partial(by_windows, side=s, overlap=o) for s, o in sides
        }
        names[f"{mpp:g} µm, halves"] = partial(in_halves, budget=options.budget)
        if not names.keys() - known.keys():
            continue
        image, tissue = stains(options.slide, mpp)
        about = {
            "micrometres": mpp,
            "pixels": list(image.shape[2:]),
            "tissue pixels": int(tissue.sum()),
            "network": f"lavlab-shell {version('lavlab-shell')}",
        }
        classes, found = whole(net, image, options.budget)
        pictures.setdefault("the whole: lumen or glass, epithelium", classes)
        if (case := f"{mpp:g} µm, whole") not in known:
            keep_case("windows", case, {**about, SHARES: shares(classes), **found})
        for case, classify in names.items():
            if case in known:
                continue
            others, found = classify(net, image)
            differs = (others != classes) & tissue
            found |= {SHARES: shares(others), "tissue of another class": float(differs.sum() / tissue.sum())}
            keep_case("windows", case, {**about, **found})
            print(case, found, flush=True)
            if mpp == 1.0 and found.get("overlap") == 0.5:
                pictures[f"another class by windows of {found['window']}²"] = differs
    if len(pictures) > 2:
        draw(FIGURES / "windows.png", options.slide, pictures)


if __name__ == "__main__":
    main()
