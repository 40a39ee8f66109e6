"""Access to the viewer: a token where others can reach the server, and never another web site.

A page of any web site can have the browser send requests to this machine, and can give its own name the address of
this machine. So the name in a request has to be one that the server was started for, and every answer forbids other
sites to use it.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from wsi_trainer.view.tiles import Forbidden

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
