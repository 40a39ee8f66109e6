"""The code on pages that teach how to extend the project runs as it is printed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import window_networks, window_training, windows
from lightning_plugin import Box, check, make_plan
from tests.conftest import RESULTS
from wsi_trainer.cli import main
from wsi_trainer.errors import SlideError
from wsi_trainer.slide import Slide, formats

PAGES = Path(__file__).resolve().parents[1] / "docs" / "how-to"
MiB = 2**20

pytestmark = pytest.mark.usefixtures("documented_once")


def code_of(page: Path) -> Any:
    """The blocks of a page, as one program."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return compile("\n".join(blocks), str(page), "exec", dont_inherit=True)


@pytest.mark.parametrize(
    ("page", "network"),
    [("add-a-rule", "Middle"), ("rules-for-neighbours", "Crosses"), ("rules-for-reductions", "Energies")],
)
def test_the_pages_on_rules_add_some(page: str, network: str) -> None:
    names: dict[str, Any] = {"__name__": __name__}  # dataclasses look their module up
    exec(code_of(PAGES / f"{page}.md"), names)
    result = names["result"]
    assert result.exact, result
    assert not result.barriers, "the rules that the page adds were not used"
    assert not check(names[network](), torch.rand(3, 4, 11, 13)).barriers, "they were not used for a batch"


def test_the_page_on_slide_formats_adds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("wsi_trainer.slide.formats.npy")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(code_of(PAGES / "add-a-slide-format.md"), vars(module))
    monkeypatch.setattr(formats, "READERS", (("npy", "NumpyReader"), *formats.READERS))
    for side in (96, 130):  # of the second, the file was replaced
        pixels = np.random.default_rng(side).integers(0, 255, (side, 112, 3), dtype=np.uint8)
        np.save(tmp_path / "slide.npy", pixels)
        assert main(["preprocess", str(tmp_path / "slide.npy"), str(tmp_path / "out"), "--overwrite"]) == 0
        with Slide.open(tmp_path / "out" / "slide.npy.zarr") as stored:
            assert (stored.read(0, 0, 0, side, 112) == pixels).all()
    (tmp_path / "slide.npy").write_bytes(b"\x93NUMPY damaged")
    with pytest.raises(SlideError, match="cannot be read as an array"):
        Slide.open(tmp_path / "slide.npy")


@pytest.mark.full
def test_the_page_on_huge_images_trains_on_a_scene_and_on_a_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the page writes its images
    names: dict[str, Any] = {"__name__": __name__}
    for page in ("any-huge-image", "volumes"):  # the second continues the first
        exec(code_of(PAGES / f"{page}.md"), names)
    for kind, steps, budget in (("scene", 20, 6), ("volume", 4, 4)):
        trainer, report = names[f"{kind}_trainer"], names[f"{kind}_report"]
        assert trainer.global_step == steps
        assert trainer.strategy.plan.plain_bytes > budget * MiB > trainer.strategy.peak_bytes, "nothing was tiled"
        assert report.exact, report
        assert not report.barriers
    assert names["right"] > 0.9
    # Boxes have no seams: together they are what the whole scene gives.
    image = names["scene_source"].read(Box.whole(names["found"].shape))
    with torch.no_grad():
        whole = names["scene_net"].eval()(image).argmax(dim=1)[0].numpy()
    assert (names["found"][:] == whole).mean() > 0.9999  # scores that tie in float32 may fall either way


def test_the_page_on_inference_has_the_memory_of_its_runs() -> None:
    page = (PAGES / "infer.md").read_text(encoding="utf-8")
    rows = json.loads((RESULTS / "infer_peaks.json").read_text())["values"]["networks"]
    over = [row["over_baseline"] - row["budget"] for row in rows]
    budgets = [row["budget"] / 1e6 for row in rows]
    assert f"within these budgets, up to {max(row['held'] / row['budget'] for row in rows):.2f} of them" in page
    assert f"no more than the budget for {sum(b <= 0 for b in over)} of the {len(rows)}" in page
    assert f"up to {max(over) / 1e6:.0f} MB beyond for the others" in page
    assert f"the budgets are {min(budgets):.0f} to {max(budgets):.0f} MB" in page


def test_the_page_on_windows_has_the_numbers_of_its_runs() -> None:
    page = (PAGES.parent / "windows.md").read_text(encoding="utf-8")
    shell, *others = [table.splitlines()[2:] for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)]
    expected = window_training.rows()
    assert others == [expected, window_networks.rows(True), window_networks.rows(False)]
    networks = json.loads((RESULTS / "window_networks.json").read_text())["cases"]
    small, large = (f"{100 * networks[name]['another class']:.0f} %" for name in window_networks.TRAINED)
    assert f"{small} of the positions have another of the 1,000 classes" in page
    assert f"and {large} by windows of 896²" in page
    medians = [case["median"] for case in networks.values() if not case["sees"].startswith("nothing")]
    assert page.count(f"{min(medians):.2f} to {max(medians):.2f} standard deviations") == 2
    assert f"those of plain PyTorch to {max(c['largest of the engine'] for c in networks.values()):.0e}" in page
    segformer, swin = (networks[name]["whole"]["budget"] // MiB for name in ("Segformer B0", "SwinUNETR 3-D"))
    assert f"(Segformer {segformer}, SwinUNETR {swin:,})" in page
    assert f"are equal to {networks['U-Net, ResNet-34']['median']:.0e}" in page
    stained = [row.split(" | ") for row in expected]
    dice = [abs(float(row[4].split()[0])) for row in stained if row[0] != "| local" and row[4] != "–"]
    assert f"the same Dice within {max(dice):.3f}" in page
    assert f"they differ by {max(dice):.3f} at most" in page
    by_windows, whole = stained[8], stained[11]  # of `all`
    assert f"it is {-float(whole[6].split()[0]):.3f} lower with whole images in both" in page
    assert f"({by_windows[5].split()[-1]} and {whole[5].split()[-1]})" in page
    means = [float(row[3].split()[0]) for row in stained]
    assert f"there are {means[4] - means[0]:.3f}" in page
    assert f"`local` has {float(stained[3][4].split()[0]):.3f} more Dice" in page

    shell_cases = json.loads((RESULTS / "windows.json").read_text())["cases"]
    cases = shell_cases.values()
    assert len(shell) == len(cases)
    for case in cases:
        shares = " : ".join(f"{100 * share:.1f}" for share in case[windows.SHARES])
        differs = "–"
        if "tissue of another class" in case:
            differs = f"{100 * case['tissue of another class']:.1f} %"
        assert any(row.endswith(f"| {differs} | {shares} |") for row in shell)
    (halves, _) = (case["tissue of another class"] for case in cases if "halves" in case)  # at 1 and 2 µm
    assert f"another class in {100 * halves:.1f} % of the tissue" in page
    whole, authors = (shell_cases[f"1 µm, {name}"] for name in ("whole", "windows of 1024², overlap 0.5"))
    assert f"and of {100 * authors['tissue of another class']:.1f} % by the windows of its authors" in page
    assert f"The whole took {whole['processor seconds']:.0f} seconds of processor at 1 µm" in page
    assert f"the authors' windows {authors['processor seconds']:.0f}; the peak of the whole was" in page
    assert f"was {whole['peak bytes'] / MiB:.0f} of the 256 MiB" in page
    differing = [100 * case["tissue of another class"] for case in cases if "window" in case]
    assert f"{min(differing):.1f} to {max(differing):.1f} %" in page


def test_the_snippet_of_the_readme_trains_and_prints_the_lines_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)  # Lightning writes its logs where it is run
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "readme"}
    readme = PAGES.parents[1] / "README.md"
    exec(code_of(readme), names)
    trainer = names["trainer"]
    assert trainer.global_step == 1
    gradients = [p.grad for p in trainer.lightning_module.parameters()]
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients if g.dim() > 1)
    # What it prints, but for the time of a step, which is the machine's.
    (shown,) = re.findall(r"```text\n(train: .*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    lines = [re.sub(r"; [\d.]+ m?s a step", "", line) for text in (shown, caplog.text) for line in text.splitlines()]
    count = len(shown.splitlines())
    assert not [line for line in lines[:count] if not any(said.endswith(line) for said in lines[count:])]
    shape = tuple(names["image"].shape)
    kept = make_plan(trainer.lightning_module.net, shape, budget="4GiB", device="cpu")
    assert f"plain PyTorch's step is {round(kept.peak_bytes / MiB)} MiB" in readme.read_text().replace("\n", " ")
    assert [segment.keep for segment in kept.segments] == [True]
