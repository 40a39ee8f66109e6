"""Options from signatures and docstrings (by jsonargparse), and one line for each thing that a parser refuses."""

import argparse
import importlib
import inspect
import re
import types
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from enum import Enum
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin

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


def expected(hint: Any) -> str | None:
    """What a type allows, in words; None if that takes more words than a line has."""
    if get_origin(hint) is Literal:
        return f"choose from {', '.join(str(choice) for choice in get_args(hint))}"
    if get_origin(hint) in (Union, types.UnionType):
        parts = [expected(part) for part in get_args(hint)]
        return None if None in parts else " or ".join(part for part in parts if part is not None)
    if hint is type(None):
        return "null"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"choose from {', '.join(hint.__members__)}"
    if isinstance(hint, type) and hint.__module__ in ("builtins", "pathlib"):
        return f"it must be of type {hint.__name__}"
    return None


def typehint_of(action: argparse.Action) -> Any:
    """The type that the parser checks an argument against, if it does."""
    return getattr(action, "_typehint", None)


# How jsonargparse words what it refuses. `tests/wsi_trainer/cli` notices when a version words it otherwise.
BAD_VALUE = re.compile(r"^Parser key \"(?P<key>[^\"]+)\":\s*(?P<why>.*)", re.DOTALL)
BAD_CLASS = re.compile(r"Problem with given class_path '(?P<path>[^']+)':\s*(?P<why>[^\n]*)")
INNER_VALUE = re.compile(
    r"Problem with given class_path '[^']+':\s*Parser key \"(?P<key>[^\"]+)\":\s*(?P<why>.*?)"
    r"(?:Got|Given) value: (?P<value>[^\n]*)",
    re.DOTALL,
)
KIND = re.compile(r"Expected an? (?:<class '(\w+)'>|typing\.Literal\[([^\]]*)\])")
BAD_FILE = re.compile(r"Problems parsing config: (?P<why>.*)", re.DOTALL)
UNKNOWN_KEY = re.compile(r"(?:Group '(?P<group>[^']+)' does not accept option|Option) '(?P<key>[^']+)'")
UNKNOWN_WORD = re.compile(r"unrecognized arguments: (?P<word>\S+)")
GIVEN = re.compile(r"(?:Got|Given) value: (?P<value>.*)", re.DOTALL)
REASON = re.compile(r"^\s*- (?P<reason>[^\n]*)", re.MULTILINE)


def explain(parser: argparse.ArgumentParser, error: Exception, words: list[str]) -> UserError:
    """The parser's error as a `UserError` that names the key or the file and what would be valid."""
    if isinstance(error, UnicodeDecodeError):
        return UserError(f"the configuration{in_config(words)} is no text in UTF-8")
    text = str(error)
    if found := BAD_VALUE.search(text):
        return UserError(about_value(parser, found["key"], found["why"], words))
    if found := UNKNOWN_KEY.search(text):
        key = ".".join(part for part in (found["group"], found["key"]) if part)
        return UserError(f"unknown key '{key}'{in_config(words)}; {suggest(key, keys_of(parser))}")
    if found := UNKNOWN_WORD.search(text):
        word = found["word"].partition("=")[0]
        word = word if "." in word else word.replace("_", "-")
        options = [f"--{key if '.' in key else key.replace('_', '-')}" for key in keys_of(parser, positional=False)]
        return UserError(f"unknown argument '{word}'; {suggest(word, options)}")
    if found := BAD_FILE.search(text):
        return UserError(f"cannot parse the configuration{in_config(words)}: {found['why']}")
    return UserError(f"{parser.prog}: {text}")


def about_value(parser: argparse.ArgumentParser, key: str, why: str, words: list[str]) -> str:
    """A value of the wrong kind, a class that cannot be made, or a config file that cannot be read."""
    if key == "config":
        return f"--config: {why}"
    if found := INNER_VALUE.search(why):
        inner = f"{key}.{found['key']}"
        where = inner if mentions(words, inner) else f"{inner}{in_config(words)}"
        kinds = [name or literal for name, literal in KIND.findall(found["why"])]
        return f"{where}: '{found['value']}' is not valid; " + (f"expected {' or '.join(kinds)}" if kinds else why)
    where = key if mentions(words, key) else f"{key}{in_config(words)}"
    if found := BAD_CLASS.search(why):
        return f"{where}: {about_class(found['path'], found['why'])}"
    given = GIVEN.search(why)
    hints = [typehint_of(action) for action in parser._actions if action.dest == key]
    if given is None or not hints:
        return f"{where}: {why}"
    return f"{where}: '{given['value'].strip()}' is not valid; {expected(hints[0]) or reasons(why)}"


def about_class(path: str, why: str) -> str:
    """A class named by its import path that does not exist or does not take an argument."""
    if found := UNKNOWN_KEY.search(why):
        return f"unknown key '{found['key']}' for {path}; {suggest(found['key'], keys_of_class(path))}"
    return f"class_path '{path}': {why}"


def reasons(why: str) -> str:
    """The parser's own reasons, without the value it repeats; one for each type that was possible."""
    listed = [reason for reason in REASON.findall(why) if "NoneType" not in reason]
    return " or ".join(listed) if listed else GIVEN.sub("", why).strip()


def about_refusal(error: Exception) -> str:
    """What a class said of its arguments, without what the parser says of other types that they could have been of."""
    text = str(error)
    listed = [reason for reason in REASON.findall(text) if not reason.startswith("Expected a <class")]
    return " or ".join(listed) if "Union subtypes" in text and listed else text


def in_config(words: list[str]) -> str:
    """The config files named on the command line, as a place."""
    files = [after for word, after in pairwise(words) if word == "--config"]
    files += [word.partition("=")[2] for word in words if word.startswith("--config=")]
    return f" in {', '.join(files)}" if files else ""


def mentions(words: list[str], key: str) -> bool:
    """Whether the key was given on the command line rather than in a file."""
    return any(word.partition("=")[0] == f"--{key}" for word in words)


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
    flags = {name for action in parser._actions if typehint_of(action) is bool for name in action.option_strings}
    following = [*words[1:], ""]
    return [
        f"{word}=true" if word in flags and after.lower() not in BOOLEANS else word
        for word, after in zip(words, following)
    ]
