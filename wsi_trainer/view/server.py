"""The page and its requests, over HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from wsi_trainer.errors import UserError
from wsi_trainer.view.guard import HEADERS, Guard
from wsi_trainer.view.scene import Scene, to_json
from wsi_trainer.view.tiles import BadNumber, NotThere, Refusal

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


_WHOLE = re.compile(r"-?[0-9]{1,9}", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]{1,12}(\.[0-9]{1,12})?(e-?[0-9]{1,2})?", re.ASCII)
_SHOWN = 40
"""Letters of a bad word that the error repeats."""


@dataclass(frozen=True)
class Asked:
    """What a request says, in its path and behind the question mark."""

    words: Mapping[str, str]

    def word(self, name: str) -> str:
        """One word, which is not empty."""
        found = self.words.get(name, "")
        if not found:
            raise BadNumber(f"{name} is missing")
        return found

    def whole(self, name: str) -> int:
        """A whole number."""
        found = self.word(name)
        if not _WHOLE.fullmatch(found):
            raise BadNumber(f"{name} is {found[:_SHOWN]!r}; it must be a whole number")
        return int(found)

    def number(self, name: str) -> float:
        """A number."""
        found = self.word(name)
        if not (_NUMBER.fullmatch(found) and math.isfinite(float(found))):
            raise BadNumber(f"{name} is {found[:_SHOWN]!r}; it must be a number")
        return float(found)


log = logging.getLogger("wsi_trainer")

KEPT = "private, max-age=3600"
"""For what is the same as long as the server runs: the page adds a number to its address, another for each start."""


@dataclass(frozen=True)
class Answer:
    """What is sent back."""

    body: bytes
    kind: str
    caching: str = "no-store"


Handler = Callable[[Scene, Asked], Answer]


def _page(scene: Scene, asked: Asked) -> Answer:
    return Answer(asset(PAGE), ASSETS[PAGE])


def _asset(scene: Scene, asked: Asked) -> Answer:
    name = asked.word("name")
    if name not in ASSETS:
        raise NotThere("there is no such file")
    return Answer(asset(name), ASSETS[name], "no-cache")


def _json(ask: Callable[[Scene, Asked], dict[str, object]]) -> Handler:
    return lambda scene, asked: Answer(to_json(ask(scene, asked)), "application/json")


def _bytes(kind: str, ask: Callable[[Scene, Asked], bytes]) -> Handler:
    return lambda scene, asked: Answer(ask(scene, asked), kind, KEPT)


def _place(asked: Asked) -> tuple[int, int, int]:
    return asked.whole("level"), asked.whole("row"), asked.whole("column")


#: Every address that is answered.
ROUTES: tuple[tuple[str, Handler], ...] = (
    ("/", _page),
    ("/assets/{name}", _asset),
    ("/contents.json", _json(lambda scene, asked: scene.overview())),
    ("/slides/{slide}/about.json", _json(lambda scene, asked: scene.about(asked.whole("slide")))),
    (
        "/slides/{slide}/tiles/{level}/{row}-{column}.jpg",
        _bytes("image/jpeg", lambda scene, asked: scene.tile(asked.whole("slide"), *_place(asked))),
    ),
    (
        "/slides/{slide}/thumbnail.jpg",
        _bytes("image/jpeg", lambda scene, asked: scene.thumbnail(asked.whole("slide"))),
    ),
    (
        "/slides/{slide}/region.png",
        _bytes(
            "image/png",
            lambda scene, asked: scene.region(
                asked.whole("slide"), *(asked.whole(name) for name in ("x", "y", "width", "height"))
            ),
        ),
    ),
    ("/slides/{slide}/regions.json", _json(lambda scene, asked: scene.regions(asked.whole("slide")))),
    (
        "/slides/{slide}/layers/{layer}/about.json",
        _json(lambda scene, asked: scene.about_layer(asked.whole("slide"), asked.word("layer"))),
    ),
    (
        "/slides/{slide}/layers/{layer}/{level}/{row}-{column}.bin",
        _bytes(
            "application/octet-stream",
            lambda scene, asked: scene.numbers(asked.whole("slide"), asked.word("layer"), *_place(asked)),
        ),
    ),
    (
        "/slides/{slide}/layers/{layer}/at.json",
        _json(
            lambda scene, asked: scene.at(
                asked.whole("slide"), asked.word("layer"), asked.number("x"), asked.number("y")
            )
        ),
    ),
    (
        "/slides/{slide}/layers/{layer}/outlines.json",
        _json(
            lambda scene, asked: scene.outlines(asked.whole("slide"), asked.word("layer"), asked.number("threshold"))
        ),
    ),
    (
        "/slides/{slide}/layers/{layer}/top.json",
        _json(lambda scene, asked: scene.top(asked.whole("slide"), asked.word("layer"), asked.whole("count"))),
    ),
)


def make_app(scene: Scene, guard: Guard, workers: int = 4) -> web.Application:
    """The application; its requests are answered by a few threads, and one that nobody waits for any more is not."""
    app = web.Application(middlewares=[_refusing, guard.middleware])
    threads = ThreadPoolExecutor(workers, thread_name_prefix="view")
    for address, handler in ROUTES:
        app.router.add_get(address, _threaded(scene, handler, threads))

    async def end(_: web.Application) -> None:
        threads.shutdown(wait=True, cancel_futures=True)
        scene.close()

    app.on_cleanup.append(end)
    logging.getLogger("aiohttp.server").addFilter(_is_request)
    return app


def _is_request(record: logging.LogRecord) -> bool:
    """Drop what aiohttp logs, with a traceback, of bytes that are no HTTP request; they are answered with 400."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _threaded(
    scene: Scene, handler: Handler, threads: ThreadPoolExecutor
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        asked = Asked({**request.query, **request.match_info})
        found = await asyncio.get_running_loop().run_in_executor(threads, partial(handler, scene, asked))
        response = web.Response(body=found.body, headers={"Content-Type": found.kind, "Cache-Control": found.caching})
        if found.kind != "image/jpeg":
            response.enable_compression()
        return response

    return answer


@web.middleware
async def _refusing(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """What goes wrong as a status and a line of JSON; every answer gets the headers that keep other sites out."""
    try:
        # aiohttp takes a line without a version, and one of HTTP/2.0, for a request like any other
        if request.version not in (HttpVersion10, HttpVersion11):
            raise Refusal("only HTTP/1.0 and HTTP/1.1 are answered")
        response = await handler(request)
    except Refusal as refusal:
        response = _told(refusal.status, str(refusal))
    except UserError as error:  # a file of the run that is damaged, or a slide that cannot be read
        response = _told(404, str(error))
    except web.HTTPMethodNotAllowed:
        response = _told(400, "only GET is answered")
    except web.HTTPNotFound:
        response = _told(404, "there is nothing at this address")
    except OSError as error:
        log.warning("%s", error)
        response = _told(404, f"cannot be read: {error.strerror}")
    response.headers.update(HEADERS)
    return response


def _told(status: int, text: str) -> web.Response:
    return web.Response(
        body=to_json({"error": text}), status=status, content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )  # fmt: skip
