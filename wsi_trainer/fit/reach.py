"""What a config may name: the classes of this package. Anything else is code of somebody, and needs `--trust`.

A config comes with a run, from a colleague or from the web, and a class or a function that it names is called. So the
words of the command line alone decide whether names lead out of this package, never the config itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jsonargparse import Namespace, set_parsing_settings  # type: ignore[attr-defined]
from jsonargparse._common import parsing_settings

from wsi_trainer import data, models
from wsi_trainer.data import PatchConfig
from wsi_trainer.errors import UserError
from wsi_trainer.models.encoders import is_encoder

FLAG = "--trust"
WHY = f"a config that names other code runs it; read the config, and give {FLAG} if you trust who wrote it"
Command = Callable[[Sequence[str]], int]
_trusted: ContextVar[bool] = ContextVar("trusted", default=True)  # a program that builds a run itself may name anything
INNER = ("network", "encoder")
"""Arguments of backbones that name a network."""
_DENIED = re.compile(r"Importing '(?P<path>[^']+)' is not allowed")
_POLICY = ("import_path_verdicts", "import_paths_enforced")


def own_paths() -> list[str]:
    """The import paths of all classes that a config may name."""
    classes = {name: getattr(models, name) for name in models.__all__}
    made = {name: found for name, found in classes.items() if isinstance(found, type)}
    paths = [f"{models.__name__}.{name}" for name in made]
    return [*paths, *(f"{found.__module__}.{found.__qualname__}" for found in made.values())]


def settings_paths() -> list[str]:
    """The import paths of settings that may be left out, which the parser looks up by name like classes."""
    return [f"{data.__name__}.{PatchConfig.__name__}", f"{PatchConfig.__module__}.{PatchConfig.__qualname__}"]


@contextmanager
def limited(trusted: bool) -> Iterator[None]:
    """In this context names in a config lead to the classes of this package only, or anywhere."""
    before = {name: parsing_settings[name] for name in _POLICY}
    token = _trusted.set(trusted)
    try:
        parsing_settings["import_path_verdicts"] = {}
        if not trusted:
            set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=[*own_paths(), *settings_paths()])
        yield
    finally:
        parsing_settings.update(before)
        _trusted.reset(token)


def within_reach(command: Command) -> Command:
    """A command that reads configs: what they name is limited, unless the flag is among its words."""

    @wraps(command)
    def limited_command(words: Sequence[str]) -> int:
        if any(word.startswith(f"{FLAG}=") for word in words):
            raise UserError(f"{FLAG} takes no value: give it, or leave it out")
        with limited(trusted=FLAG in words):
            return command([word for word in words if word != FLAG])

    return limited_command


def trust_words() -> list[str]:
    """The flag, where it was given: for a command that starts another."""
    return [FLAG] if _trusted.get() else []


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
    if not own and not _trusted.get():
        raise UserError(about("model.backbone", named))


def about(key: str, named: str) -> str:
    """What is said of a name that leads out of this package."""
    return f"{key}: {named} is not a class of wsi_trainer.models, and {WHY}"


def denied(error: Exception) -> str | None:
    """The import path that the parser was not allowed to follow, if that is what an error is about."""
    found = _DENIED.search(str(error))
    return found["path"] if found else None
