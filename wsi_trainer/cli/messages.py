"""What a parser refused, in one line to act on: the name, the nearest valid one, the valid choices."""

import argparse
import re
from itertools import pairwise

from wsi_trainer.cli.choices import expected, keys_of, keys_of_class, suggest, typehint_of
from wsi_trainer.errors import UserError

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
