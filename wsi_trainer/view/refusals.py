"""Why a request is not answered, and the HTTP status that says so."""

from __future__ import annotations

from wsi_trainer.errors import UserError


class Refusal(UserError):
    """A request that is not answered."""

    status = 400


class BadNumber(Refusal):
    """A number of a request that is none, or is out of its range."""


class Forbidden(Refusal):
    """A request without the token, or one that another web site made the browser send."""

    status = 403


class NotThere(Refusal):
    """Something that the run does not have, or that cannot be read."""

    status = 404
