"""Requests to the viewer, as bytes on a connection: what is said, and how."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.fuzz.kinds import Target, Unjudged
from tests.fuzz.mutations import TEXT
from tests.wsi_trainer.view.conftest import make_run, serving
from wsi_trainer.errors import UserError
from wsi_trainer.view.scene import Scene

SECRET = b"what nobody may read"
ADDRESSES = (
    "/", "/contents.json", "/assets/view.js", "/slides/0/about.json", "/slides/0/tiles/0/0-0.jpg",
    "/slides/1/region.png?x=10&y=20&width=50&height=40", "/slides/0/layers/0/at.json?x=5&y=7.5",
    "/slides/0/layers/0/outlines.json?threshold=0.5", "/slides/0/layers/0/top.json?count=3", "/slides/0/regions.json",
)  # fmt: skip
_open = ExitStack()
_ports: list[int] = []


def requests(folder: Path) -> Sequence[Path]:
    """A server that runs until the process ends, and good requests to it."""
    made = make_run(folder / "run", folder / "slides")
    (folder / "secret.txt").write_bytes(SECRET)
    _ports.append(_open.enter_context(serving(Scene(made.contents()))).port)
    found = []
    for number, address in enumerate(ADDRESSES):
        path = folder / f"request{number}.txt"
        head = f"GET {address} HTTP/1.1\r\nHost: localhost:{_ports[-1]}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        path.write_bytes(head.encode())
        found.append(path)
    return found


def asked(data: bytes, seconds: float = 60) -> tuple[int, bytes]:
    """Status and content of the answer; 0 where the server hangs up, or waits for more."""
    with socket.create_connection(("127.0.0.1", _ports[-1]), timeout=seconds) as connection:
        try:
            connection.sendall(data)
            answer = b""
            while part := connection.recv(1 << 16):
                answer += part
        except (ConnectionError, TimeoutError):  # of a request that has not ended, the server waits for the rest
            return 0, b""
    head, _, content = answer.partition(b"\r\n\r\n")
    said = re.match(rb"HTTP/(\d\.\d) (\d{3}) ", head)
    if answer and said is None:
        raise AssertionError(f"no answer of HTTP: {answer[:100]!r}")
    version, status = (said[1], int(said[2])) if said else (b"", 0)
    # The status line repeats the version of the request, which is 0.9 where a change took it away: a refusal may do so.
    assert version in (b"1.0", b"1.1") or not status or 400 <= status < 500, f"{status} for HTTP/{version.decode()}"
    return status, content


def read(path: Path) -> Any:
    """The answer to a request; a refusal is an error. Then a good request is answered as ever."""
    status, content = asked(path.read_bytes(), seconds=1)
    assert SECRET not in content, "the server shows a file that is none of the run's"
    assert status < 500, f"status {status}: {content[:200]!r}"
    after, _ = asked(
        f"GET /contents.json HTTP/1.1\r\nHost: localhost:{_ports[-1]}\r\nConnection: close\r\n\r\n".encode()
    )
    assert after == 200, "the server answers no more"
    if status != 200:
        raise UserError(f"{path}: {status}")
    return content


def truth(path: Path) -> Any:
    """The address of a changed request is another one, whose answer nobody else knows."""
    raise Unjudged


TARGETS = (Target("viewer's requests", requests, read, truth, TEXT),)
