"""The copy that opens without a server."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.wsi_trainer.view.conftest import Made
from wsi_trainer.cli import main
from wsi_trainer.view import static_copy

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


def test_only_some_slides(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    assert main(["view", str(made.folder.path), f"--static={out}", "--only=[slide 3 <&>.tif]"]) == 0
    assert [path.name for path in (out / "slides").iterdir()] == ["1"]


def test_a_copy_that_failed_leaves_nothing_and_can_be_made_again(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["view", str(made.folder.path), f"--static={tmp_path / 'copy'}", "--longest=1000"]

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(static_copy, "asset", full)  # after the slides
        assert main(words) == 2
    assert not list(tmp_path.iterdir())
    (tmp_path / ".copy.partial").mkdir()  # as of one that was killed
    (tmp_path / ".copy.partial" / "old").touch()
    assert main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["copy"] and not (tmp_path / "copy" / "old").exists()
