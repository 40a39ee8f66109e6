"""Changes of a file, each made of a seed alone: bits, lengths, places, numbers, tags, values."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

ABSURD = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
_TAGS = (254, 256, 257, 258, 259, 262, 277, 322, 324, 339, 34675)
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e308, -1e308, float("nan"), float("inf"), "", "\0",
    "../..", "/etc/passwd", "x" * 70_000, "é\u202e\x1b[31m", [], {}, [[]], [1] * 1000, {"": None}, "pickle", "1e9999",
)  # fmt: skip
Mutation = Callable[[random.Random, bytearray], bytearray]


def flip_bits(chance: random.Random, data: bytearray) -> bytearray:
    for _ in range(chance.choice((1, 1, 2, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data


def write_bytes(chance: random.Random, data: bytearray) -> bytearray:
    at = chance.randrange(len(data))
    part = chance.randbytes(chance.choice((1, 4, 64)))
    data[at : at + len(part)] = part[: len(data) - at]
    return data


def write_number(chance: random.Random, data: bytearray) -> bytearray:
    """A number that no file has a good reason for, of either order of bytes, more often near the beginning."""
    size = chance.choice((1, 2, 4, 8))
    value = chance.choice(ABSURD) & ((1 << 8 * size) - 1)
    reach = len(data) if chance.random() < 0.5 else min(len(data), 512)
    at = chance.randrange(reach)
    data[at : at + size] = value.to_bytes(size, chance.choice(("little", "big")))
    return data


def cut_off(chance: random.Random, data: bytearray) -> bytearray:
    return data[: chance.randrange(len(data))]


def leave_out(chance: random.Random, data: bytearray) -> bytearray:
    at = chance.randrange(len(data))
    del data[at : at + chance.choice((1, 2, 7, 100, 5000))]
    return data


def repeat(chance: random.Random, data: bytearray) -> bytearray:
    at = chance.randrange(len(data))
    part = data[at : at + chance.choice((1, 4, 100, 5000))]
    data[at:at] = part * chance.choice((1, 3))
    return data


def exchange(chance: random.Random, data: bytearray) -> bytearray:
    size = chance.choice((1, 4, 12, 512))
    one, other = (chance.randrange(max(1, len(data) - size)) for _ in range(2))
    if abs(one - other) >= size:
        data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]
    return data


def zeros(chance: random.Random, data: bytearray) -> bytearray:
    """A piece that was never written, as after a power cut."""
    at, size = chance.randrange(len(data)), chance.choice((16, 512, 4096))
    data[at : at + size] = bytes(len(data[at : at + size]))
    return data


def tags(chance: random.Random, data: bytearray) -> bytearray:
    """An entry of a directory of a TIFF with another tag, type, count or value, or two of them exchanged."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(data[:4]))
    if order is None:  # BigTIFF, or what was none
        return write_number(chance, data)
    places, at = [], struct.unpack_from(order + "I", data, 4)[0]
    while 0 < at < len(data) - 2 and len(places) < 500:
        count = struct.unpack_from(order + "H", data, at)[0]
        places += [at + 2 + 12 * entry for entry in range(count) if at + 14 + 12 * entry < len(data)]
        end = at + 2 + 12 * count
        at = struct.unpack_from(order + "I", data, end)[0] if end + 4 <= len(data) else 0
    if not places:
        return write_number(chance, data)
    one = chance.choice(places)
    what = chance.randrange(5)
    if what == 0:
        struct.pack_into(order + "H", data, one, chance.choice(_TAGS))
    elif what == 1:
        struct.pack_into(order + "H", data, one + 2, chance.choice((0, 1, 2, 3, 4, 5, 12, 13, 16, 99)))
    elif what == 2:
        struct.pack_into(order + "I", data, one + 4, chance.choice(ABSURD) & 0xFFFFFFFF)
    elif what == 3:
        struct.pack_into(order + "I", data, one + 8, chance.choice((*ABSURD, len(data), one)) & 0xFFFFFFFF)
    else:
        other = chance.choice(places)
        data[one + 2 : one + 12], data[other + 2 : other + 12] = data[other + 2 : other + 12], data[one + 2 : one + 12]
    return data


def values(chance: random.Random, data: bytearray) -> bytearray:
    """A value of a text of JSON is another one, is left out, or lies much deeper; other texts have a word changed."""
    try:
        content = json.loads(bytes(data))
    except (ValueError, RecursionError):  # the change before has made it deep
        return words(chance, data)
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in list(keys):
            places.append((value, key))
            walk(value[key])

    walk(content)
    if not places:
        return flip_bits(chance, data)
    for _ in range(chance.choice((1, 1, 3))):
        where, key = chance.choice(places)
        what = chance.randrange(8)
        try:
            if what == 0:
                del where[key]
            elif what == 1:
                where[key] = {"deep": "DEEP"} if chance.random() < 0.3 else [where[key]]
            elif what == 2:
                other, its = chance.choice(places)
                where[key], other[its] = other[its], where[key]
            else:
                where[key] = chance.choice(VALUES)
        except (KeyError, IndexError):  # it has gone already
            continue
    try:
        text = json.dumps(content, indent=chance.choice((None, 1)))
    except (ValueError, RecursionError):  # two that were exchanged hold each other
        return flip_bits(chance, data)
    return bytearray(text.replace('"DEEP"', "[" * 100_000 + "]" * 100_000).encode())


def words(chance: random.Random, data: bytearray) -> bytearray:
    """A word of a text is another one of it, or an absurd one."""
    found = [match.span() for match in re.finditer(rb"[^\s,:;<>\"'=/{}\[\]]+", bytes(data))]
    if not found:
        return flip_bits(chance, data)
    start, end = chance.choice(found)
    low, high = chance.choice(found)
    odd = (
        b"",
        b"nan",
        b"-1",
        b"1e999",
        b"9" * 5000,
        b"\xff\xfe",
        b'"',
        b"=1+1",
        b"&a",
        b"*a",
        b"<x>",
        b"../../x",
        b"\0",
    )
    data[start:end] = bytes(data[low:high]) if chance.random() < 0.3 else chance.choice(odd)
    return data


BINARY: tuple[Mutation, ...] = (
    flip_bits, flip_bits, write_bytes, write_number, write_number, cut_off, leave_out, repeat, exchange, zeros,
)  # fmt: skip
TIFF: tuple[Mutation, ...] = (*BINARY, tags, tags, tags, tags)
TEXT: tuple[Mutation, ...] = (*BINARY, values, values, values, words, words, words, words)


def mutated(chance: random.Random, data: bytes, kinds: tuple[Mutation, ...]) -> tuple[bytes, str]:
    """The file with one to three changes, and their names."""
    found, done = bytearray(data), []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if found:
            change = chance.choice(kinds)
            found = change(chance, found)
            done.append(change.__name__)
    return bytes(found), "+".join(done)
