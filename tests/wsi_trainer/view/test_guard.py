"""Access to the viewer."""

from __future__ import annotations

import getpass
import socket

import pytest
from rich.console import Console

from tests.wsi_trainer.view.conftest import Made, Served, serving
from wsi_trainer.view.command import tell
from wsi_trainer.view.scene import Scene
from wsi_trainer.view.server import Guard, new_token

ADDRESSES = ["/", "/contents.json", "/slides/0/about.json", "/slides/0/tiles/0/0-0.jpg", "/assets/view.js"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_without_the_token_nothing_is_shown(made: Made, address: str) -> None:
    token = new_token()
    with serving(Scene(made.contents()), token) as served:
        wrong = [{}, {"Cookie": "wsi-train-00000000=x"}, {"Cookie": f"{Guard(token).cookie}=x"}]
        for headers in wrong:
            assert served.get(address, **headers).status == 403
        for bad in ("x", "%00", "é", token[:-1], token + "a", ""):
            target = f"{address}?token={bad}".encode("ascii", "ignore").decode()
            assert served.get(target).status == 403
        opened = served.get(f"/?token={token}")
        assert opened.status == 302 and opened.headers["location"] == "/"
        cookie = opened.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Lax" in cookie
        assert served.get(address, Cookie=cookie.split(";")[0]).status == 200


@pytest.mark.parametrize(
    "host",
    "evil.example 127.0.0.1.evil.example localhost.evil.example:80 [::1 localhost/.evil.com localhost#.evil.com "
    "user@localhost ".split(" "),
)
def test_another_name_for_this_machine_is_refused(served: Served, host: str) -> None:
    reply = served.get("/contents.json", Host=host)
    assert reply.status in (400, 403)
    assert b"slides" not in reply.body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9999", "[::1]:80", "LOCALHOST:1", "127.0.0.2:8765"])
def test_a_tunnel_may_have_another_port(served: Served, host: str) -> None:
    assert served.get("/contents.json", Host=host).status == 200


def test_other_sites_may_not_use_it(served: Served) -> None:
    for site in ("cross-site", "same-site"):  # the latter is another port of this machine
        assert served.get("/contents.json", Sec_Fetch_Site=site).status == 403
    assert served.get("/contents.json", Sec_Fetch_Site="same-origin").status == 200
    for address in (*ADDRESSES, "/nothing", "/slides/99/about.json"):
        headers = served.get(address).headers
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


WRONG = {"version": b"GET / HTTP/9.9", "long": b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000, "TLS": b"\x16\x03\x01"}


@pytest.mark.parametrize("sent", WRONG.values(), ids=WRONG)
def test_what_is_no_request_is_answered_without_a_traceback(
    served: Served, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall(sent + b"\r\n\r\n")
        assert connection.makefile("rb").read().partition(b"\r\n")[0].endswith(b"400 Bad Request")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("error", [KeyError("getpwuid(): uid not found: 1234"), OSError("No username set")])
def test_a_user_without_a_name_gets_the_link(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nameless() -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", nameless)
    tell(Console(), Guard(None), "127.0.0.2", browser=False)(8765)
    shown = capsys.readouterr().out
    assert "http://127.0.0.2:8765/" in shown and f"ssh -L 8765:127.0.0.2:8765 {socket.gethostname()}" in shown
