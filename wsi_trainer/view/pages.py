"""The files of the page, which are served as they are."""

from __future__ import annotations

from importlib.resources import files

PAGE = "view.html"
ASSETS = {
    "view.html": "text/html; charset=utf-8",
    "view.css": "text/css; charset=utf-8",
    "openseadragon.min.js": "text/javascript; charset=utf-8",
    "openseadragon-license.txt": "text/plain; charset=utf-8",
    "data.js": "text/javascript; charset=utf-8",
    "drawing.js": "text/javascript; charset=utf-8",
    "panes.js": "text/javascript; charset=utf-8",
    "list.js": "text/javascript; charset=utf-8",
    "layers.js": "text/javascript; charset=utf-8",
    "places.js": "text/javascript; charset=utf-8",
    "slides.js": "text/javascript; charset=utf-8",
    "controls.js": "text/javascript; charset=utf-8",
    "view.js": "text/javascript; charset=utf-8",
}
"""The files of the page. No other is served."""


def asset(name: str) -> bytes:
    """A file of the page."""
    return files("wsi_trainer.view").joinpath("assets", name).read_bytes()
