"""Code that a config may name: the classes of this package, unless the command line trusts who wrote it.

A config comes with a run, from a colleague or from the web, and a class or a function that it names is called. So the
words of the command line alone decide whether names lead out of this package, never the config itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jsonargparse import Namespace, set_parsing_settings  # type: ignore[attr-defined]
from jsonargparse._common import parsing_settings

from wsi_trainer.data.patches import PatchConfig
from wsi_trainer.errors import UserError
from wsi_trainer.models.encoders import is_encoder

Command = Callable[[Sequence[str]], int]
FLAG = "--trust"
TRUST = (
    f"{FLAG}, which only the command line can give, lets the config name classes and functions beyond this package: "
    "naming code in a config runs it."
)
WHY = f"a config that names other code runs it; read the config, and give {FLAG} if you trust who wrote it"
INNER = ("network", "encoder")
"""Arguments of backbones that name a network."""
_trusted: ContextVar[bool | None] = ContextVar("trusted", default=None)  # None outside of commands
_DENIED = re.compile(r"Importing '(?P<path>[^']+)' is not allowed")
_POLICY = ("import_path_verdicts", "import_paths_enforced")


def is_limited() -> bool:
    """True within a command, whose words decide; False in a program."""
    return _trusted.get() is not None


def own_paths() -> list[str]:
    """The import paths of all classes that a config may name."""
    models = sys.modules[__package__]  # which is imported before its parts, and imports them
    made = {name: found for name in models.__all__ if isinstance(found := getattr(models, name), type)}
    paths = [f"{models.__name__}.{name}" for name in made]
    return [*paths, *(f"{found.__module__}.{found.__qualname__}" for found in made.values())]


@contextmanager
def limited(trusted: bool) -> Iterator[None]:
    """In this context names in a config lead to the classes of this package only, or anywhere."""
    before = {name: parsing_settings[name] for name in _POLICY}
    token = _trusted.set(trusted)
    try:
        parsing_settings["import_path_verdicts"] = {}
        if not trusted:
            set_parsing_settings(
                import_path_denylist=["*"],
                import_path_allowlist=[*own_paths(), f"{PatchConfig.__module__}.{PatchConfig.__qualname__}"],
            )
        yield
    finally:
        parsing_settings.update(before)
        _trusted.reset(token)


def limits_imports(command: Command) -> Command:
    """A command that reads configs: the code that they name is limited, unless the flag is among its words."""

    @wraps(command)
    def limited_command(words: Sequence[str]) -> int:
        if any(word.startswith(f"{FLAG}=") for word in words):
            raise UserError(f"{FLAG} takes no value: give it, or leave it out")
        with limited(trusted=FLAG in words):
            return command([word for word in words if word != FLAG])

    return limited_command


def check_backbone(named: Any) -> None:
    """Refuse a backbone, or a network in one, that is given as the import path of something else than a class of this
    package.
    """
    if named is None:
        return
    if isinstance(named, Namespace):
        arguments = named.get("init_args") or Namespace()
        for key in INNER:
            check_backbone(arguments.get(key))
        return
    own = not isinstance(named, str) or named.startswith(("timm:", "transformers:")) or "." not in named
    own = own or is_encoder(named) or named in own_paths()
    if not own and _trusted.get() is False:
        raise UserError(about("model.backbone", named))


def about(key: str, named: str) -> str:
    """The refusal of a name that leads out of this package."""
    return f"{key}: {named} is not a class of wsi_trainer.models, and {WHY}"


def denied(error: Exception) -> str | None:
    """The import path that the parser was not allowed to follow, if that is what an error is about."""
    found = _DENIED.search(str(error))
    return found["path"] if found else None
