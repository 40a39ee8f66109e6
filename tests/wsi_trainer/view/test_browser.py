"""Actions of a person, in Chromium."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from tests.wsi_trainer.view.conftest import DOWNSAMPLE, STRIDE, Made, Served, open_page, serving
from wsi_trainer.view.contents import contents_of
from wsi_trainer.view.scene import Scene
from wsi_trainer.view.static_copy import write_static

SQUARE = STRIDE * DOWNSAMPLE
BY_ID = "document.getElementById"


def link_of(page: Any) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(page.url).fragment).items()}


@pytest.mark.slow
def test_worst_mistake_map_and_place(page: Any, served: Served, made: Made, tmp_path: Path) -> None:
    open_page(page, served.address)
    assert page.locator("#slides li").count() == 4
    assert "slide 0 <&>.tif · label a · predicted b (0.90), error 0.900" in page.locator("#about").text_content()
    page.keyboard.press("1")  # the place with the largest value
    page.wait_for_function("() => document.querySelector('#here-text').textContent.includes('rank')")
    row, column = np.unravel_index(made.maps[0].argmax(), made.maps[0].shape)
    text = page.locator("#here-text").text_content()
    assert f"x {column * SQUARE + SQUARE // 2} px, y {row * SQUARE + SQUARE // 2} px" in text
    assert f"rank 1 of {made.maps[0].size}" in text
    page.wait_for_function(f"() => location.hash.includes('x={column * SQUARE + SQUARE // 2}')")
    assert float(link_of(page)["scale"]) == pytest.approx(1, rel=1e-3)
    picture = page.evaluate(
        """async () => {
          const image = document.querySelector('#here-picture');
          await image.decode();
          const canvas = document.createElement('canvas');
          [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
          canvas.getContext('2d').drawImage(image, 0, 0);
          return Array.from(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data);
        }"""
    )
    shown = np.array(picture, np.uint8).reshape(224, 224, 4)[..., :3]
    x, y = column * SQUARE + SQUARE // 2 - 112, row * SQUARE + SQUARE // 2 - 112
    white = np.full((700 + 448, 1100 + 448, 3), 255, np.uint8)
    white[224:-224, 224:-224] = made.pixels[0]
    np.testing.assert_array_equal(shown, white[y + 224 : y + 448, x + 224 : x + 448])
    page.screenshot(path=tmp_path / "place.png")
    assert (tmp_path / "place.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_map_is_drawn_where_its_positions_are(page: Any, served: Served, made: Made) -> None:
    """The colour on the screen of each position is that of its value."""
    open_page(page, f"{served.address}/#slide=slide+0+%3C%26%3E.tif&x=550&y=350&scale=0.5")
    page.evaluate(
        """() => { for (const [id, value] of [['opacity', 1], ['low', -3], ['high', 3], ['colours', 'viridis']]) {
          const input = document.getElementById(id); input.value = value; input.dispatchEvent(new Event('input'));
        } for (const [id, value] of [['low', -3], ['high', 3]]) {
          const input = document.getElementById(id); input.value = value; input.dispatchEvent(new Event('input'));
        } for (const id of ['fade', 'show-regions']) document.getElementById(id).click(); }"""
    )
    rows, columns = made.maps[0].shape
    positions = [(row, column) for row in range(0, rows, 5) for column in range(0, columns, 5)]
    places = [((column + 0.5) * SQUARE, (row + 0.5) * SQUARE) for row, column in positions]
    table = json.loads(served.get("/contents.json").body)["colours"]["viridis"]
    colours = np.array(table).reshape(256, 3)
    expected = [255 * np.clip((float(made.maps[0][position]) + 3) / 6, 0, 1) for position in positions]
    for _ in range(40):  # the map is drawn when it has come
        shown = page.evaluate(
            """(places) => { const canvas = document.querySelector('#left canvas.layers');
              const picture = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
              const at = (size, place, centre) => Math.floor(size / 2 + (place - centre) * 0.5);
              const pixel = (x, y) => 4 * (at(canvas.height, y, 350) * canvas.width + at(canvas.width, x, 550));
              return places.map(([x, y]) => Array.from(picture.data.slice(pixel(x, y), pixel(x, y) + 4))); }""",
            places,
        )
        found = [np.abs(colours - colour).sum(1).argmin() for *colour, _ in shown]
        errors = np.abs(np.subtract(found, expected))
        if errors.max() <= 1.5:
            break
        page.wait_for_timeout(250)
    assert errors.max() <= 1.5 and all(alpha == 255 for *_, alpha in shown)


@pytest.mark.slow
def test_layers_lists_views_and_keys(page: Any, served: Served) -> None:
    open_page(page, served.address)
    for key in ("o", "t"):
        page.keyboard.press(key)
    page.wait_for_function("() => document.querySelector('#message').textContent === ''")
    page.keyboard.press("s")
    page.locator("#right").wait_for(state="visible")
    box = page.locator("#right").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    before = float(link_of(page)["scale"])
    page.mouse.wheel(0, -300)  # in the right view: the left one follows
    page.wait_for_function(f"() => !location.hash.includes('scale={before:.4}')")
    assert link_of(page)["side"] == "1"
    page.keyboard.press("d")
    dark = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("d")
    assert dark != page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("n")
    page.wait_for_function("() => document.querySelector('#about').textContent.startsWith('slide 3')")
    page.keyboard.press("/")
    page.keyboard.type("slide 2")
    page.wait_for_function("() => document.querySelectorAll('#slides li').length === 1")
    page.locator("#slides li").click()
    page.wait_for_function("() => document.querySelector('#about').textContent.startsWith('slide 2')")
    page.locator("#filter").fill("")
    page.locator("#only-wrong").check()
    assert page.locator("#slides li").count() == 2
    page.locator("#sort").select_option("best")
    assert page.locator("#slides li").first.text_content().startswith("slide 3")


@pytest.mark.slow
def test_two_runs_side_by_side(page: Any, made_twice: tuple[Made, Made]) -> None:
    first, second = made_twice
    with serving(Scene(contents_of(first.folder.path, second.folder.path))) as served:
        open_page(page, served.address)
        assert page.locator("#right .caption").text_content() == "second: activation, b"
        assert page.locator("#left .caption").text_content() == "first: activation, b"
        page.locator("#sort").select_option("better")
        assert page.locator("#slides li").first.text_content().startswith("slide 0")
        page.goto("about:blank")  # before the server ends


@pytest.mark.slow
def test_the_copy_opens_as_a_file(page: Any, made: Made, tmp_path: Path) -> None:
    write_static(Scene(made.contents()), tmp_path / "copy", longest=1000)
    open_page(page, (tmp_path / "copy" / "index.html").as_uri())
    page.keyboard.press("1")
    page.wait_for_function("() => document.querySelector('#here-text').textContent.includes('rank')")
    row, column = np.unravel_index(made.maps[0].argmax(), made.maps[0].shape)
    text = page.locator("#here-text").text_content()
    assert f"x {column * SQUARE + SQUARE // 2} px, y {row * SQUARE + SQUARE // 2} px" in text
    value, rank = text.split("value ")[1].split("rank ")
    assert float(value) == pytest.approx(float(made.maps[0].max()), rel=1e-3)
    assert rank == f"1 of {made.maps[0].size}"
    box = page.locator("#left").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2 + 60, box["y"] + box["height"] / 2 + 40)
    page.wait_for_function("() => /rank (?!1 of)/.test(document.querySelector('#here-text').textContent)")
    text = page.locator("#here-text").text_content()
    x, y = (int(n) for n in re.findall(r"(\d+) px", text))
    value = made.maps[0][y // SQUARE, x // SQUARE]
    assert f"rank {1 + (made.maps[0] > value).sum()} of {made.maps[0].size}" in text
    for key in ("o", "t", "s", "n"):
        page.keyboard.press(key)
    page.wait_for_function("() => document.querySelector('#about').textContent.startsWith('slide 3')")


@pytest.mark.slow
def test_a_link_keeps_what_is_shown(page: Any, served: Served) -> None:
    """Layers, colours and outlines, after keys and inputs, in another window and after going back."""
    address = f"{served.address}/#slide=slide+0+%3C%26%3E.tif&x=550&y=350&scale=0.5"
    open_page(page, address)
    assert not set(link_of(page)) & {"show-map", "show-outlines", "show-tissue", "opacity", "colours"}
    for key in "otr":
        page.keyboard.press(key)
    page.evaluate(
        """() => { for (const [id, value] of [['opacity', 0.25], ['threshold', 0.4], ['colours', 'viridis']]) {
          const input = document.getElementById(id); input.value = value; input.dispatchEvent(new Event('input'));
        } }"""
    )
    page.wait_for_function("() => location.hash.includes('colours=viridis')")
    shared = page.url
    page.goto("about:blank")
    for _ in range(2):
        open_page(page, shared)
        shown = (
            "() => ['map', 'outlines', 'regions', 'tissue'].map((n) => document.getElementById(`show-${n}`).checked)"
        )
        assert page.evaluate(shown) == [True, True, False, True]
        values = "() => ['opacity', 'threshold', 'colours'].map((id) => byId(id).value)".replace("byId", BY_ID)
        assert page.evaluate(values) == ["0.25", "0.4", "viridis"]
    page.evaluate(f"() => {{ location.hash = '{address.partition('#')[2]}'; }}")
    page.wait_for_function("() => !document.getElementById('show-outlines').checked")
    assert page.evaluate(values) == [
        "0.6",
        "0",
        page.evaluate("() => document.getElementById('colours').options[0].value"),
    ]
