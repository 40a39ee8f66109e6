"""Errors of slides; each names the slide and the reason."""

from __future__ import annotations

from pathlib import Path

from wsi_trainer.errors import UserError


class SlideError(UserError):
    """A slide cannot be used, for the reason given."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (self.path, self.reason)


class UnsupportedSlide(SlideError):
    """A reader does not read this kind of slide, and another one may.

    Where a reader knows a reason for which the slide must not be read at all, it raises `SlideError`, and no other one
    is asked.

    Attributes:
        change: what a reader that does read it changes of its pixels; empty where nothing.
    """

    def __init__(self, path: Path | str, reason: str, change: str = "") -> None:
        super().__init__(path, reason)
        self.change = change

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (self.path, self.reason, self.change)


class AbsentResolution(SlideError):
    """A slide has no pixels of the resolution that was asked for, and they cannot be made of what it has."""


class UnknownResolution(SlideError):
    """Nothing plausible says how large a pixel is, and guessing would spoil training in silence."""
