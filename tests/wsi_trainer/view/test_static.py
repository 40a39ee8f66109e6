"""The copy that opens without a server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.wsi_trainer.view.conftest import Made
from wsi_trainer.cli import main
from wsi_trainer.view.server import ASSETS, asset

SAID = re.compile(r'wsi\.data\.put\("(?P<address>[^"]+)", (?P<content>.*)\);\n', re.DOTALL)


def said(path: Path) -> object:
    """The content of a script of the copy, which is under its own address."""
    found = SAID.fullmatch(path.read_text())
    assert found is not None
    assert path.as_posix().endswith(f"{found['address']}.js")
    return json.loads(found["content"])


@pytest.fixture(scope="module")
def copy(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("still") / "copy"
    words = ["view", str(made.folder.path), f"--regions={made.regions}", f"--static={out}", "--longest=1000"]
    assert main(words) == 0
    return out


def test_all_that_the_page_asks_for_is_there(copy: Path, made: Made) -> None:
    contents = (copy / "contents.js").read_text()
    slides = json.loads(contents.removeprefix("window.wsiStatic = ").removesuffix(";\n"))["slides"]
    assert [slide["name"][6] for slide in slides] == ["0", "3", "2", "1"]
    for slide in slides:
        folder, index = copy / "slides" / str(slide["number"]), int(slide["name"][6])
        about = said(folder / "about.json.js")
        height, width = made.pixels[index].shape[:2]
        assert (about["width"], about["height"]) == (width, height)  # type: ignore[index]
        finest = about["finest"]  # type: ignore[index]
        assert finest == int(max(height, width) > 1000)
        for level in range(finest, about["coarsest"] + 1):  # type: ignore[index]
            sides = [-(-size // 2**level) for size in (width, height)]
            last = folder / "tiles" / str(level) / f"{(sides[1] - 1) // 512}-{(sides[0] - 1) // 512}.jpg"
            assert Image.open(last).size == tuple((size - 1) % 512 + 1 for size in sides)
        numbers = base64.b64decode(str(said(folder / "layers/0/0/0-0.bin.js")))
        np.testing.assert_array_equal(np.frombuffer(numbers, "<f4"), made.maps[index].reshape(-1))
        ranks = np.frombuffer(base64.b64decode(str(said(folder / "layers/0/ranks/0-0.bin.js"))), "<f4")
        assert ranks.tolist() == [1 + (made.maps[index] > value).sum() for value in made.maps[index].reshape(-1)]
        assert said(folder / "layers/0/top.json.js")
        # The smallest slide has 3 × 2 pixels of a mask with tissue, which is dust.
        about = (folder / "layers/tissue/about.json.js").read_text()
        assert ("broken" not in about) == (max(height, width) > 100)
    page = (copy / "index.html").read_text()
    for name in re.findall(r'(?:src|href)="([^":]+)"', page):
        assert (copy / name).is_file()


def test_the_copy_does_not_say_where_it_was_made(copy: Path, made: Made) -> None:
    place = str(made.folder.path.parent)
    assert not [path for path in copy.rglob("*") if path.is_file() and place.encode() in path.read_bytes()]


# -- openSeadragon is the file that was chosen, with its notices


VERSION = "6.1.1"
SHA256 = {
    "openseadragon.min.js": "14d587cd3ee7c4861f1a41077ce642029364a21029956ba635bd8fb1202cf9ad",
    "openseadragon-license.txt": "a4801fd595dffd7928ac1394959983ea17cb0191230e8ed90858cf4f4c12c88b",
}


@pytest.mark.parametrize("name", SHA256)
def test_the_files_are_those_of_the_package(name: str) -> None:
    assert name in ASSETS and hashlib.sha256(asset(name)).hexdigest() == SHA256[name]


def test_the_script_names_its_version_and_the_notices_are_there() -> None:
    assert f"openseadragon {VERSION}".encode() in asset("openseadragon.min.js")[:200]
    notices = asset("openseadragon-license.txt").decode()
    for owner in ("OpenSeadragon contributors", "John Resig", "Matt Snider"):
        assert owner in notices
    assert "Redistributions of source code must retain the above copyright" in notices
