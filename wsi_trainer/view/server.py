"""The page and its requests over HTTP: a token where others can reach the server, and never another web site.

A page of any web site can have the browser send requests to this machine, and can give its own name the address of
this machine. So the name in a request has to be one that the server was started for, and every answer forbids other
sites to use it.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from wsi_trainer.errors import UserError
from wsi_trainer.view.scene import Scene, to_json
from wsi_trainer.view.tiles import BadNumber, Forbidden, NotThere, Refusal

_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,128}", re.ASCII)
_HOST = re.compile(r"(\[([0-9a-f:.]+)\]|([a-z0-9.-]+))(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""With every answer."""


def is_local(host: str) -> bool:
    """True where only this machine reaches a server at this address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(24)


@dataclass(frozen=True)
class Guard:
    """Decides about each request.

    Attributes:
        token: What the link has; None where only this machine reaches the server and no token was asked for.
    """

    token: str | None

    @property
    def cookie(self) -> str:
        """The name of the cookie that holds the token after the link was opened: another for each server, since
        cookies do not tell ports apart.
        """
        return "wsi-train-" + (hmac.new(b"name", (self.token or "").encode(), "sha256").hexdigest()[:8])

    def knows(self, token: str | None) -> bool:
        """True for the right token."""
        if self.token is None:
            return True
        fits = token is not None and _TOKEN.fullmatch(token) is not None
        return hmac.compare_digest(self.token, token if fits and token is not None else "")

    def check_host(self, host: str | None) -> None:
        """Refuse a name that stands for this machine only by somebody else's word; with a token any may."""
        if self.token is None and not is_local(_name_of(host)):
            raise Forbidden("this server answers to localhost only; start it with --token to reach it by another name")

    @property
    def middleware(self) -> Callable[..., Awaitable[web.StreamResponse]]:
        """The check, as aiohttp takes it."""

        @web.middleware
        async def check(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            self.check_host(request.headers.get("Host"))
            if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and request.path != "/":
                raise Forbidden("another web site asked for this")
            if self.token is None:
                return await handler(request)
            given = request.query.get("token")
            if given is None:
                if not self.knows(request.cookies.get(self.cookie)):
                    raise Forbidden("open the link that wsi-train view printed: it holds the token")
                return await handler(request)
            if not self.knows(given):
                raise Forbidden("the token is not that of this server; open the link that wsi-train view printed")
            response = web.Response(status=302, headers={"Location": "/"})  # so that the address shows no token
            # Lax, since a strict cookie would not be sent after a click on the link in a mail.
            response.set_cookie(self.cookie, given, httponly=True, samesite="Lax", path="/")
            return response

        return check


def _name_of(host: str | None) -> str:
    """The name of a Host header, without the port."""
    found = _HOST.fullmatch(host or "")
    return (found[2] or found[3]) if found else ""


PAGE = "view.html"
TEXTS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}
ASSETS = {
    path.name: f"{TEXTS[Path(path.name).suffix]}; charset=utf-8"
    for path in files("wsi_trainer.view").joinpath("assets").iterdir()
}
"""The files of the page. No other is served."""


def asset(name: str) -> bytes:
    """A file of the page."""
    return files("wsi_trainer.view").joinpath("assets", name).read_bytes()


Query = Mapping[str, str]
"""The parameters of a request, of its path and behind the question mark."""
_KINDS = {int: "a whole number", float: "a number", str: "a word"}


def read(query: Query, name: str, kind: type) -> Any:
    """A parameter of a request; numbers are finite."""
    text = query.get(name, "")
    if not text:
        raise BadNumber(f"{name} is missing")
    try:
        value = kind(text)
        if kind is float and not math.isfinite(value):
            raise ValueError
    except ValueError as error:
        raise BadNumber(f"{name} is {text[:40]!r}; it must be {_KINDS[kind]}") from error
    return value


log = logging.getLogger("wsi_trainer")
KINDS = {"json": "application/json", "jpg": "image/jpeg", "png": "image/png", "bin": "application/octet-stream"}
KEPT = "private, max-age=3600"
"""Caching of all that is the same as long as the server runs: the page adds a number to its address, another for each
start.
"""


@dataclass(frozen=True)
class File:
    """A file of the page."""

    body: bytes
    kind: str
    caching: str = "no-store"


def page(_: Scene) -> File:
    """The page itself."""
    return File(asset(PAGE), ASSETS[PAGE])


def part(_: Scene, name: str) -> File:
    """A file that the page asks for."""
    if name not in ASSETS:
        raise NotThere("there is no such file")
    return File(asset(name), ASSETS[name], "no-cache")


ROUTES: Mapping[str, Callable[..., Any]] = {
    "/": page,
    "/assets/{name}": part,
    "/contents.json": Scene.overview,
    "/slides/{slide}/about.json": Scene.about,
    "/slides/{slide}/tiles/{level}/{row}-{column}.jpg": Scene.tile,
    "/slides/{slide}/thumbnail.jpg": Scene.thumbnail,
    "/slides/{slide}/region.png": Scene.region,
    "/slides/{slide}/regions.json": Scene.regions,
    "/slides/{slide}/layers/{layer}/about.json": Scene.about_layer,
    "/slides/{slide}/layers/{layer}/{level}/{row}-{column}.bin": Scene.numbers,
    "/slides/{slide}/layers/{layer}/at.json": Scene.at,
    "/slides/{slide}/layers/{layer}/outlines.json": Scene.outlines,
    "/slides/{slide}/layers/{layer}/top.json": Scene.top,
}
"""Every address that is answered. Parameters are read by their annotations."""


def answer(scene: Scene, address: str, query: Query) -> File:
    """The answer of a route."""
    ask = ROUTES[address]
    kinds = get_type_hints(ask)
    wanted = [one.name for one in signature(ask).parameters.values() if one.default is one.empty][1:]
    found = ask(scene, **{name: read(query, name, kinds[name]) for name in wanted})
    if isinstance(found, File):
        return found
    kind = KINDS[address.rpartition(".")[2]]
    return File(found, kind, KEPT) if isinstance(found, bytes) else File(to_json(found), kind)


def make_app(scene: Scene, guard: Guard, workers: int = 4) -> web.Application:
    """The application; its requests are answered by a few threads, and one that nobody waits for any more is not."""
    app = web.Application(middlewares=[_refusing, guard.middleware])
    threads = ThreadPoolExecutor(workers, thread_name_prefix="view")
    for address in ROUTES:
        app.router.add_get(address, _threaded(scene, address, threads))

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
    scene: Scene, address: str, threads: ThreadPoolExecutor
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def threaded(request: web.Request) -> web.StreamResponse:
        query = {**request.query, **request.match_info}
        found = await asyncio.get_running_loop().run_in_executor(threads, answer, scene, address, query)
        response = web.Response(body=found.body, headers={"Content-Type": found.kind, "Cache-Control": found.caching})
        if found.kind != "image/jpeg":
            response.enable_compression()
        return response

    return threaded


@web.middleware
async def _refusing(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer errors by a status and a line of JSON; every answer gets the headers that keep other sites out."""
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
