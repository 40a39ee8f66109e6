"""Whether the user asked for all that is known of an error, with `--debug`. Imports only the standard library."""

from contextvars import ContextVar

ASKED: ContextVar[bool] = ContextVar("debug", default=False)
