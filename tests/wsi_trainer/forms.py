"""Ten slides in every form in which they come: files, copies, stores, features; with the names that hospitals give.

Names are those of TCGA and CLAM, and names with spaces, umlauts and dots. Each form is made when it is first asked for.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import h5py
import numpy as np
import torch

from wsi_trainer.cli import main
from wsi_trainer.data.manifest import SlideRecord, read_manifest
from wsi_trainer.models import ResNet
from wsi_trainer.slide.names import slide_name
from wsi_trainer.synthetic import SlideSpec, write_slide

NAMES = (
    "TCGA-05-4244-01Z-00-DX1.d4ff32cd-b4a8.svs", "a.ome.tif", "s8.ndpi.tif", "case 03 #1.tiff", "x.v2.tif",
    "日本 (02).tif", "s07.tif", "Müller_01.tif", "Fall.10.tif", "s10.svs",
)  # fmt: skip
SPLITS = ("train", "train", "train", "train", "val", "val", "test", "test", "", "")
"""Splits of the run's slides; the run does not know the last two."""
TRAINED = {slide_name(name) for name, split in zip(NAMES, SPLITS) if split in ("train", "val")}
UNSEEN = {slide_name(name) for name in NAMES} - TRAINED
SIZE = 32
BAG = [
    "--model.backbone=wsi_trainer.models.PatchEncoder", f"--model.backbone.size={SIZE}",
    "--model.backbone.network=wsi_trainer.models.ResNet", "--model.backbone.network.widths=[4,8]",
    "--model.backbone.network.norm=group", f"--data.patches.size={SIZE}", "--data.patches.over=slide",
    "--train.precision=32-true", "--train.accelerator=cpu",
]  # fmt: skip
FROZEN = ["--model.backbone=wsi_trainer.models.FrozenFeatures", "--model.backbone.width=8"]
CONVERT = ["--tissue=none", "--workers=1", "--stall-minutes=0"]


def write_table(path: Path, lines: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(lines[0]))
        table.writeheader()
        table.writerows(lines)
    return path


def table(path: Path, called: Callable[[str], str], only: str = "", regions: Path | None = None) -> Path:
    """A manifest of all slides, or of the run's with their splits."""
    lines = [
        {"slide": called(name), "label": str(number % 2), "patient": f"patient {number}", "split": split}
        | ({} if regions is None else {"regions": str(regions / f"{slide_name(name)}.geojson")})
        for number, (name, split) in enumerate(zip(NAMES, SPLITS))
        if split or not only
    ]
    return write_table(path, lines if only else [{**line, "split": ""} for line in lines])


def other(name: str) -> str:
    """Another name of a slide, the same each time."""
    return f"kopie {NAMES.index(name)}.x.tif"


@dataclass(frozen=True)
class Form:
    """One form of the ten slides.

    Attributes:
        table: The manifest of all of them.
        stores: The folder of their stores.
        features: The folder of their features.
        called: What it calls each.
        has_hashes: Whether its files tell which slides they are of.
    """

    table: Path
    stores: Path | None = None
    features: Path | None = None
    called: Callable[[str], str] = str
    has_hashes: bool = True

    @property
    def words(self) -> list[str]:
        said = [f"--data.features={self.features}"] if self.features else []
        return said if self.features else [f"--data.stores={self.stores or 'null'}"]

    def records(self) -> list[SlideRecord]:
        return read_manifest(self.table, stores=self.stores)

    def names(self, records: list[SlideRecord]) -> set[str]:
        own = {self.called(name): slide_name(name) for name in NAMES}
        return {own[record.slide] for record in records}


class Forms(Mapping[str, Form]):
    """All forms of the slides, below a folder."""

    KINDS = (
        "files", "without endings", "copies", "stores", "coarse stores", "features, slides", "features",
        "features renamed", "features of others", "of others, slides", "of others, renamed",
    )  # fmt: skip

    def __init__(self, here: Path) -> None:
        self.here = here

    def __iter__(self) -> Iterator[str]:
        return iter(self.KINDS)

    def __len__(self) -> int:
        return len(self.KINDS)

    def __getitem__(self, kind: str) -> Form:
        match kind:
            case "files":
                return Form(self.files)
            case "without endings":
                return Form(table(self.slides / "clam.csv", slide_name), called=slide_name)
            case "copies":
                return Form(self.copies, called=other)
            case "stores":
                return Form(self.files, self.stores)
            case "coarse stores":
                return Form(self.files, self.coarse)
            case "features, slides":
                return Form(self.files, features=self.features)
            case "features":
                return Form(self.bare, features=self.features, called=slide_name)
            case "features renamed":
                return Form(self.renamed, features=self._renamed(self.features), called=other)
            case "features of others":
                return Form(self.bare, features=self.of_others, called=slide_name, has_hashes=False)
            case "of others, slides":
                return Form(self.files, features=self.of_others)
            case "of others, renamed":
                return Form(self.renamed, features=self._renamed(self.of_others), called=other, has_hashes=False)
        raise KeyError(kind)

    @cached_property
    def drawn(self) -> Path:
        """Outlines for each slide."""
        folder = self._folder("drawn")
        ring = [[10, 10], [60, 10], [60, 60], [10, 60], [10, 10]]
        for name in NAMES:
            geometry = {"type": "Polygon", "coordinates": [ring]}
            facts = {"type": "Feature", "properties": {"classification": {"name": "lesion"}}, "geometry": geometry}
            (folder / f"{slide_name(name)}.geojson").write_text(json.dumps(facts))
        return folder

    @cached_property
    def slides(self) -> Path:
        folder = self._folder("slides")
        for number, name in enumerate(NAMES):
            spec = SlideSpec(100 + 4 * number, 96, seed=3, slide=number, patient=number, positive=True)
            write_slide(folder / name, spec)
        return folder

    @cached_property
    def files(self) -> Path:
        return table(self.slides / "slides.csv", str)

    @cached_property
    def copies(self) -> Path:
        folder = self._folder("copies")
        for name in NAMES:
            shutil.copyfile(self.slides / name, folder / other(name))
        return table(folder / "slides.csv", other)

    @cached_property
    def stores(self) -> Path:
        assert main(["preprocess", str(self.files), str(self.here / "stores"), *CONVERT]) == 0
        return self.here / "stores"

    @cached_property
    def coarse(self) -> Path:
        assert main(["preprocess", str(self.files), str(self.here / "coarse"), "--mpp", "1", *CONVERT]) == 0
        return self.here / "coarse"

    @cached_property
    def features(self) -> Path:
        torch.manual_seed(1)
        torch.save(ResNet((4, 8), norm="group").state_dict(), self.here / "encoder.pt")
        embed = ["embed", *BAG, f"--model.pretrained={self.here / 'encoder.pt'}"]
        assert main([*embed, f"--data.manifest={self.files}", f"--out={self.here / 'features'}"]) == 0
        return self.here / "features"

    @cached_property
    def of_others(self) -> Path:
        """Features that another program made, without checksums of slides."""
        folder = self._folder("features of others")
        for number, name in enumerate(NAMES):
            with h5py.File(folder / f"{slide_name(name)}.h5", "w") as file:
                file["features"] = np.random.default_rng(number).normal(size=(5, 8)).astype(np.float32)
        return folder

    @cached_property
    def bare(self) -> Path:
        """A manifest of slides whose files are not there."""
        return table(self._folder("absent") / "bare.csv", slide_name)

    @cached_property
    def renamed(self) -> Path:
        return table(self._folder("absent") / "renamed.csv", other)

    def _renamed(self, features: Path) -> Path:
        folder = self.here / f"{features.name} renamed"
        if not folder.is_dir():
            folder.mkdir()
            for name in NAMES:
                own, another = f"{slide_name(name)}.h5", f"{slide_name(other(name))}.h5"
                shutil.copyfile(features / own, folder / another)
        return folder

    def _folder(self, name: str) -> Path:
        folder = self.here / name
        folder.mkdir(exist_ok=True)
        return folder
