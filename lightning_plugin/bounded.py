"""Dictionaries that remember the latest of what they were asked for: slides have as many sizes as there are slides."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def put_last(known: dict[K, V], key: K, value: V, most: int) -> V:
    """Put an entry last, and let go of the first where there are more than ``most``."""
    known.pop(key, None)
    known[key] = value
    shorten(known, most)
    return value


def shorten(known: dict[K, V], most: int) -> None:
    """Let go of the first entries beyond ``most``."""
    while len(known) > most:
        del known[next(iter(known))]
