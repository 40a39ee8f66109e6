"""Every parser of the command line reads YAML through the door for files of others."""

from __future__ import annotations

from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from wsi_trainer.foreign.texts import check_text


def read_texts_safely() -> None:
    """Have every parser check texts before it reads them."""
    read = get_loader("yaml")
    if getattr(read, "checks", False):
        return

    def checked(text: str) -> Any:
        check_text(text)
        return read(text)

    checked.checks = True  # type: ignore[attr-defined]
    set_loader("yaml", checked, exceptions=(yaml.YAMLError,))
