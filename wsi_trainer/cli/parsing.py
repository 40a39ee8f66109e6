"""Options from signatures and docstrings (by jsonargparse), and one line for each thing that a parser refuses."""

import argparse
import importlib
import inspect
import re
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader, set_parsing_settings  # type: ignore[attr-defined]

from wsi_trainer.errors import UserError
from wsi_trainer.io.untrusted import check_text

OWN_KEYS = ("help", "config", "print_config", "print_shtab", argparse.SUPPRESS)
MAX_LISTED = 24


def keys_of(parser: argparse.ArgumentParser, positional: bool = True) -> list[str]:
    """The keys that a config file may hold, without the parser's own and without the names of groups."""
    keys = [
        action.dest
        for action in parser._actions
        if action.dest not in OWN_KEYS and not action.dest.endswith(".help") and (positional or action.option_strings)
    ]
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


def keys_of_class(class_path: str) -> list[str]:
    """The arguments of a class that a config names by its import path; none if it cannot be imported."""
    module_name, _, name = class_path.rpartition(".")
    try:
        parameters = inspect.signature(getattr(importlib.import_module(module_name), name)).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return []
    return list(parameters)


def suggest(wrong: str, valid: list[str]) -> str:
    """The nearest valid name, then its neighbours: those of the same group, or as many as a line can hold."""
    near = get_close_matches(wrong, valid, n=1, cutoff=0.5)
    group = near[0].rpartition(".")[0] if near else wrong.rpartition(".")[0]
    neighbours = [name for name in valid if name.rpartition(".")[0] == group] or valid
    listed = ", ".join(neighbours[:MAX_LISTED]) + (", ..." if len(neighbours) > MAX_LISTED else "")
    return (f"did you mean '{near[0]}'? " if near else "") + f"valid: {listed}"


# How jsonargparse words what it refuses. `tests/wsi_trainer/cli` notices when a version words it otherwise.
KEY = re.compile(r"Parser key \"([^\"]+)\"")
CLASS = re.compile(r"class_path[ =]'([^']+)'")
UNKNOWN = re.compile(
    r"(?:Group '(?P<group>[^']+)' does not accept option '|Option '|unrecognized arguments: )(?P<key>[^'\s=]+)"
)
EXPECTED = re.compile(r"Expected an? (?:<class '(?:\w+\.)*(\w+)'>|typing\.Literal\[([^\]]*)\]|([^.\n]*))")
PROBLEM = re.compile(r"Problem with given (class_path '[^']+'):\s*+(?!Parser key)([^\n]*)")
VALUE = re.compile(r"(?:Got|Given) value: ([^\n]*)")
REASON = re.compile(r"^\s*- (?P<reason>[^\n]*)", re.MULTILINE)


def explain(parser: argparse.ArgumentParser, error: Exception, words: list[str]) -> UserError:
    """The parser's error as a `UserError` that names the key or the file and what would be valid."""
    if isinstance(error, UnicodeDecodeError):
        return UserError(f"the configuration{in_config(words)} is no text in UTF-8")
    text = str(error)
    if found := UNKNOWN.search(text):
        return UserError(about_unknown(parser, text, found, in_config(words)))
    keys = KEY.findall(text)
    if not keys:
        return UserError(f"{parser.prog}: {text.replace('config:', f'config{in_config(words)}:')}")
    key = ".".join(keys)
    where = key if any(word.partition("=")[0] == f"--{key}" for word in words) else f"{key}{in_config(words)}"
    value = VALUE.search(text)
    kinds = ["".join(kind) for kind in EXPECTED.findall(text[: value.start()])] if value else []
    if problem := PROBLEM.search(text):
        return UserError(f"{where}: {problem[1]}: {problem[2]}")
    if value is None or not kinds:
        return UserError(f"{where}: {KEY.split(text)[-1].lstrip(': ')}")
    allowed = " or ".join(kind.replace("NoneType", "null") for kind in kinds)
    return UserError(f"{where}: '{value[1].strip()}' is not valid; expected {allowed}")


def about_unknown(parser: argparse.ArgumentParser, text: str, found: re.Match[str], config: str) -> str:
    """An argument, a key, or an argument of a class that does not exist, with the nearest that does."""
    word = found["key"]
    if word.startswith("-") or "unrecognized" in found[0]:
        word = word if "." in word else word.replace("_", "-")
        options = [f"--{key if '.' in key else key.replace('_', '-')}" for key in keys_of(parser, positional=False)]
        return f"unknown argument '{word}'; {suggest(word, options)}"
    if of_class := CLASS.search(text):
        where = ".".join(KEY.findall(text))
        return f"{where}{config}: unknown key '{word}' for {of_class[1]}; {suggest(word, keys_of_class(of_class[1]))}"
    key = f"{found['group']}.{word}" if found["group"] else word
    return f"unknown key '{key}'{config}; {suggest(key, keys_of(parser))}"


def about_refusal(error: Exception) -> str:
    """The refusal of a class, without what the parser says of other types that its arguments could have been of."""
    text = str(error)
    listed = [reason for reason in REASON.findall(text) if not reason.startswith("Expected a <class")]
    return " or ".join(listed) if "Union subtypes" in text and listed else text


def in_config(words: list[str]) -> str:
    """The config files named on the command line, as a place."""
    files = [after for word, after in pairwise(words) if word == "--config"]
    files += [word.partition("=")[2] for word in words if word.startswith("--config=")]
    return f" in {', '.join(files)}" if files else ""


def read_texts_safely(config_of: Callable[[Any], Any] = lambda content: content) -> None:
    """Have every parser check texts before it reads them.

    Args:
        config_of: Makes a config of what was read.
    """
    read = get_loader("yaml")
    read = getattr(read, "plainly", read)

    def checked(text: str) -> Any:
        check_text(text)
        return config_of(read(text))

    checked.plainly = read  # type: ignore[attr-defined]
    set_loader("yaml", checked, exceptions=(yaml.YAMLError,))


read_texts_safely()
set_parsing_settings(docstring_parse_attribute_docstrings=True)
BOOLEANS = ("true", "false", "yes", "no", "on", "off", "1", "0")


class Parser(ArgumentParser):
    """A parser whose help spells options with hyphens; the words that it is given have underscores by then."""

    def format_help(self, *how: Any, **more: Any) -> str:
        text = super().format_help(*how, **more)
        return re.sub(r"--[a-z]\w*(?![\w.])", lambda option: option[0].replace("_", "-"), text)


def run(function: Callable[..., Any], name: str, about: str, words: list[str]) -> Any:
    """Parse the words by the function's signature and call it."""
    parser = build_parser(function, name, about)
    return function(**parse(parser, words))


def build_parser(function: Callable[..., Any], name: str, about: str) -> ArgumentParser:
    """The parser of one subcommand: `--config`, then the function's arguments."""
    parser = Parser(prog=f"wsi-train {name}", description=about, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="a YAML file with any of the options below")
    parser.add_function_arguments(function, as_group=False, as_positional=True)
    return parser


def parse(parser: ArgumentParser, words: list[str]) -> dict[str, Any]:
    """The arguments by name; whatever the parser refuses becomes one clear `UserError`."""
    refuse_empty(words)
    try:
        values: Namespace = parser.instantiate(parser.parse_args(spell_out_flags(parser, words)))
    except (ArgumentError, UnicodeDecodeError) as error:
        raise explain(parser, error, words) from error
    return {name: value for name, value in vars(values).items() if name != "config"}


def refuse_empty(words: Sequence[str]) -> None:
    """Refuse an argument of no letters: as a path it would be the working folder."""
    for before, word in zip(["", *words], words):
        if not word.strip() or (word.startswith("-") and word.endswith("=")):
            name = word.rstrip("=") or (before if before.startswith("-") else "an argument")
            raise UserError(f"{name} is empty; is a variable of the shell not set?")


def spell_out_flags(parser: ArgumentParser, words: list[str]) -> list[str]:
    """`--json` as `--json=true`: a boolean option needs no value, but may have one, as in a config."""
    flags = {
        name
        for action in parser._actions
        if getattr(action, "_typehint", None) is bool
        for name in action.option_strings
    }
    following = [*words[1:], ""]
    return [
        f"{word}=true" if word in flags and after.lower() not in BOOLEANS else word
        for word, after in zip(words, following)
    ]
