"""A function's typed arguments as options: jsonargparse reads the signature and the docstring."""

import re
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings  # type: ignore[attr-defined]

from wsi_trainer.cli.choices import typehint_of
from wsi_trainer.cli.messages import explain
from wsi_trainer.cli.table import Command
from wsi_trainer.cli.texts import read_texts_safely
from wsi_trainer.errors import UserError

read_texts_safely()
set_parsing_settings(docstring_parse_attribute_docstrings=True)
BOOLEANS = ("true", "false", "yes", "no", "on", "off", "1", "0")


class Parser(ArgumentParser):
    """A parser whose help spells options with hyphens; the words that it is given have underscores by then."""

    def format_help(self, *how: Any, **more: Any) -> str:
        text = super().format_help(*how, **more)
        return re.sub(r"--[a-z]\w*(?![\w.])", lambda option: option[0].replace("_", "-"), text)


def run(function: Callable[..., Any], command: Command, words: list[str]) -> Any:
    """Parse the words by the function's signature and call it."""
    parser = build_parser(function, command)
    return function(**parse(parser, words))


def build_parser(function: Callable[..., Any], command: Command) -> ArgumentParser:
    """The parser of one subcommand: `--config`, then the function's arguments."""
    parser = Parser(prog=f"wsi-train {command.name}", description=command.help, exit_on_error=False, allow_abbrev=False)
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
