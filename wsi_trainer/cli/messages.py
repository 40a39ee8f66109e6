"""What a parser refused, in one line to act on: the name, the nearest valid one, the valid choices."""

import argparse
import re
from difflib import get_close_matches
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from wsi_trainer.errors import UserError

UNKNOWN_KEY = re.compile(r"(?:Group '(?P<group>[^']+)' does not accept option|Option) '(?P<key>[^']+)'")
UNKNOWN_WORD = re.compile(r"unrecognized arguments: (?P<word>\S+)")
BAD_VALUE = re.compile(r"Parser key \"(?P<key>[^\"]+)\":\s*(?P<why>.*)", re.DOTALL)
BAD_FILE = re.compile(r"Problems parsing config: (?P<why>.*)", re.DOTALL)
GOT_VALUE = re.compile(r"Got value: (?P<value>.*)", re.DOTALL)
MAX_LISTED = 24


def explain(parser: argparse.ArgumentParser, error: Exception, words: list[str]) -> UserError:
    """The parser's error as a `UserError` that names the key or the file and what would be valid."""
    text = str(error)
    if found := UNKNOWN_KEY.search(text):
        key = ".".join(part for part in (found["group"], found["key"]) if part)
        return UserError(f"unknown key '{key}'{in_config(words)}; {suggest(key, keys_of(parser))}")
    if found := UNKNOWN_WORD.search(text):
        word = found["word"].partition("=")[0]
        options = [f"--{key}" for key in keys_of(parser, positional=False)]
        return UserError(f"unknown argument '{word}'; {suggest(word, options)}")
    if found := BAD_VALUE.search(text):
        return explain_value(parser, found["key"], found["why"], words)
    if found := BAD_FILE.search(text):
        return UserError(f"cannot parse the configuration{in_config(words)}: {found['why']}")
    return UserError(f"{parser.prog}: {text}")


def explain_value(parser: argparse.ArgumentParser, key: str, why: str, words: list[str]) -> UserError:
    """A value of the wrong kind, or a config file that cannot be read."""
    if key == "config":
        return UserError(f"--config: {why}")
    actions = [action for action in parser._actions if action.dest == key]
    got = GOT_VALUE.search(why)
    if not actions or got is None:
        return UserError(f"{key}: {why}")
    where = in_config(words) if not mentions(words, key) else ""
    return UserError(
        f"{key}{where}: '{got['value'].strip()}' is not valid; {expected(typehint_of(actions[0]), why)}"
    )


def expected(hint: Any, why: str) -> str:
    """The choices of a type, or its name."""
    if get_origin(hint) is Literal:
        return f"choose from {', '.join(str(choice) for choice in get_args(hint))}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"choose from {', '.join(hint.__members__)}"
    if isinstance(hint, type):
        return f"it must be of type {hint.__name__}"
    return why


def typehint_of(action: argparse.Action) -> Any:
    """The type that jsonargparse checks an argument against, if it does."""
    return getattr(action, "_typehint", None)


def keys_of(parser: argparse.ArgumentParser, positional: bool = True) -> list[str]:
    """The keys that a config file may hold, without the parser's own."""
    own = {"help", "config", "print_config", "print_shtab", argparse.SUPPRESS}
    return [
        action.dest
        for action in parser._actions
        if action.dest not in own and (positional or action.option_strings)
    ]


def suggest(wrong: str, valid: list[str]) -> str:
    """The nearest valid name, then all of them (or as many as a line can hold)."""
    near = get_close_matches(wrong, valid, n=1, cutoff=0.5)
    listed = ", ".join(valid[:MAX_LISTED]) + (", ..." if len(valid) > MAX_LISTED else "")
    return (f"did you mean '{near[0]}'? " if near else "") + f"valid: {listed}"


def in_config(words: list[str]) -> str:
    """The config files named on the command line, as a place."""
    files = [after for word, after in pairwise(words) if word == "--config"]
    files += [word.partition("=")[2] for word in words if word.startswith("--config=")]
    return f" in {', '.join(str(Path(file)) for file in files)}" if files else ""


def mentions(words: list[str], key: str) -> bool:
    """Whether the key was given on the command line rather than in a file."""
    return any(word.partition("=")[0] == f"--{key}" for word in words)
