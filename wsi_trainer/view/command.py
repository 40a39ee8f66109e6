"""The command `view`."""

from __future__ import annotations

import asyncio
import getpass
import socket
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from aiohttp import web
from rich.console import Console

from wsi_trainer.errors import UserError
from wsi_trainer.io.display import say
from wsi_trainer.slide.formats.base import Range, ReadOptions
from wsi_trainer.view.contents import contents_of
from wsi_trainer.view.scene import Scene
from wsi_trainer.view.server import Guard, is_local, make_app, new_token
from wsi_trainer.view.static_copy import LONGEST, write_static

PORT = 8765
_TRIES = 20
"""Ports that are tried, from the wanted one on."""


def view(
    what: Path,
    compare: Path | None = None,
    regions: Path | None = None,
    name: str | None = None,
    checkpoint: str = "best",
    data_root: Path | None = None,
    host: str = "127.0.0.1",
    port: int = PORT,
    token: bool = False,
    browser: bool = False,
    channel: str | None = None,
    to_8bit: str | None = None,
    static: Path | None = None,
    only: Sequence[str] = (),
    longest: int = LONGEST,
) -> None:
    """Look at slides, and at what a model said of them, in a browser.

    The page lists the slides of a run, worst mistakes first, and shows each with its maps, outlines and tissue. Of
    slides alone it shows the slides. Nothing is converted: tiles are read when they are looked at. Ctrl-C ends it.

    Args:
        what: The folder of a run or a deployment; or a slide, a store, a folder of slides or a manifest.
        compare: The folder of a second run on the same slides, or a checkpoint of this or another run.
        regions: Folder with SLIDE.geojson, annotations to be drawn.
        name: The name of a cohort that the run was tested on, instead of the run's own slides.
        checkpoint: The checkpoint whose results are shown: best, last, or a path.
        data_root: The folder that holds the slides now, if they were moved.
        host: The address to listen at. Others than this machine's own reach it only with the token in the link.
        port: The port to listen at; the next free one if it is taken.
        token: Ask for a token on this machine too: where others have accounts on it, they reach the same address.
        browser: Open the link in a browser.
        channel: The channel of slides with several, by its name or number.
        to_8bit: LOW:HIGH, the values that become 0 and 255 in slides of other than 8 bits.
        static: Write a copy that opens without a server into this folder, and end.
        only: The names of the slides in this copy; by default those that were predicted, or all where none were.
        longest: Pixels of the longer side of a slide in this copy; 0 keeps all.
    """
    check(what, port)
    contents = contents_of(what, compare, regions, name, data_root, checkpoint)
    options = ReadOptions(channel, None if to_8bit is None else Range.parse(to_8bit))
    console = Console()
    for note in contents.notes:
        say(console, note)
    scene = Scene(contents, options)
    if static is not None:
        with closing(scene):
            count = write_static(scene, static, only, longest)
        say(console, f"{count} slides: {static / 'index.html'}")
        return
    guard = Guard(new_token() if token or not is_local(host) else None)
    listening = listen(host, port)
    try:
        asyncio.run(serve(scene, guard, listening, tell(console, guard, host, browser)))
    except KeyboardInterrupt:
        say(console, "ended")
    finally:
        listening.close()


def check(what: Path, port: int) -> None:
    """Refuse what cannot be shown, and a port that is none."""
    if not 0 <= port < 2**16:
        raise UserError(f"--port is {port}; it must be 0 to 65535, where 0 is any free one")
    if not what.exists() and not any(sign in str(what) for sign in "*?["):
        raise UserError(f"there is nothing at {what}; give the folder of a run, a slide or a store")


def listen(host: str, port: int) -> socket.socket:
    """A socket at the port, or at the next free one."""
    for wanted in [port] if port == 0 else range(port, min(port + _TRIES, 2**16)):
        try:
            family = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, wanted), family=family)
        except socket.gaierror as error:
            raise UserError(f"--host is {host!r}, which is no address of this machine: {error.strerror}") from error
        except OSError as error:
            reason = error
    raise UserError(f"cannot listen at {host}, ports {port} to {wanted}: {reason.strerror}; give another --port")


def tell(console: Console, guard: Guard, host: str, browser: bool) -> Callable[[int], None]:
    """Printer of the link, called as soon as the server answers."""

    def ready(port: int) -> None:
        query = "" if guard.token is None else f"?token={guard.token}"
        machine = socket.gethostname()
        name = f"[{host}]" if ":" in host else host
        link = f"http://{machine if host in ('0.0.0.0', '::') else name}:{port}/{query}"  # noqa: S104
        say(console, f"looking at it: {link}")
        if is_local(host):
            say(console, f"from another machine: ssh -L {port}:{name}:{port} {user()}{machine}")
            say(console, f"  and there: http://localhost:{port}/{query}")
        say(console, "Ctrl-C ends it.")
        if browser:
            webbrowser.open(link)

    return ready


def user() -> str:
    """The user's name with an @ behind it; empty in containers, where a user may be a number without a name."""
    try:
        return f"{getpass.getuser()}@"
    except (KeyError, OSError):  # KeyError before Python 3.13
        return ""


async def serve(scene: Scene, guard: Guard, listening: socket.socket, ready: Callable[[int], None]) -> None:
    """Answer until the process is interrupted."""
    runner = web.AppRunner(make_app(scene, guard), access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        ready(listening.getsockname()[1])
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
