"""Models alone in a folder, and Hugging Face's hub, which keeps such folders.

The hub's mixin is used and not inherited: importing it takes as long as importing torch, and its hooks on constructors
want to own the config.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wsi_trainer.errors import UserError

CONFIG, WEIGHTS, ABOUT, CARD = "config.json", "model.safetensors", "about.json", "README.md"
FILES = (CONFIG, WEIGHTS, ABOUT, CARD)
"""The files of a model alone: the keys of its config, its weights, what is known of its training, the model card."""


def folder_of(name: str | Path, **download: Any) -> Path:
    """The folder of a model, which is downloaded from the hub where there is none of this name.

    Args:
        name: The folder; or the name on the hub, `user/model`.
        download: Arguments of `huggingface_hub.snapshot_download`, such as `revision` or `local_files_only`.
    """
    if not Path(name).exists():
        found = _hub(name).snapshot_download(str(name), allow_patterns=list(FILES), **download)
        return Path(found)
    return Path(name)


ON_HUB = "hf-hub:"
"""Beginning of a name on the hub where a file of weights is meant, as timm has it."""


def downloaded(weights: Path) -> Path:
    """The file of weights, which is downloaded once where the hub has it, as `hf-hub:user/model`, or
    `hf-hub:user/model/file` where it has a name of its own.
    """
    if not is_on_hub(weights):
        return weights
    words = weights.as_posix().removeprefix(ON_HUB).split("/")
    name, file = "/".join(words[:2]), "/".join(words[2:])
    kinds = (file,) if file else (WEIGHTS, "pytorch_model.bin")
    folder = Path(_hub(name).snapshot_download(name, allow_patterns=list(kinds)))
    found = next((folder / kind for kind in kinds if (folder / kind).is_file()), None)
    if found is None and len(kinds) == 1:
        raise UserError(f"{name} on the hub has no file {kinds[0]}")
    if found is None:
        raise UserError(f"{name} on the hub has neither {' nor '.join(kinds)}; download its file, and give that")
    return found


def is_on_hub(weights: Path) -> bool:
    """True for the name of a model on the hub in place of a file."""
    return str(weights).startswith(ON_HUB)


def push(save: Callable[[Path], None], name: str, **options: Any) -> str:
    """Upload what `save` writes into a folder; returns the address.

    Args:
        save: Writes the model.
        name: The name on the hub, `user/model`.
        options: Arguments of `huggingface_hub.ModelHubMixin.push_to_hub`.
    """
    mixin: Any = _hub(name).ModelHubMixin

    class Model(mixin):  # type: ignore[misc]
        def _save_pretrained(self, save_directory: Path) -> None:
            save(save_directory)

    return str(Model().push_to_hub(name, **options))


def _hub(name: str | Path) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise UserError(
            f"there is no folder {name}, and a model of the hub needs huggingface_hub: pip install 'wsi-trainer[hub]'"
        ) from error
