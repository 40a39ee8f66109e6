"""Reading files of weights and checkpoints: numbers only, whoever wrote them.

PyTorch's files are pickles, and a pickle may name any function and have it called. So only tensors and plain values are
read, in every command, and a file that holds more is refused.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_plugin import WholeCheckpoints
from wsi_trainer.errors import UserError

SAFETENSORS = ".safetensors"
_CODE = re.compile(r"(?:GLOBAL|Unsupported global:|class) `?([\w.]+\.[\w.]+)")


def read_weights(path: Path) -> Any:
    """The content of a file that `torch.save` or safetensors wrote: tensors and plain values.

    Raises:
        UserError: It is none, is damaged, or holds code.
    """
    try:
        if path.is_file() and not path.stat().st_size:
            raise UserError(f"{path} is empty")
        if path.suffix == SAFETENSORS:
            return _safetensors(path)
        _check_sums(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is odd about a file that is then refused
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        reason = error.strerror if error.filename else "it is cut short or damaged"
        raise UserError(f"{path} cannot be read: {reason}") from error
    except pickle.UnpicklingError as error:
        if found := _CODE.search(str(error)):
            raise UserError(
                f"{path} holds more than weights: it names {found[1]}, which reading it would run. It is not read; "
                "save the weights alone, with torch.save(network.state_dict(), path)"
            ) from error
        raise UserError(f"{path} is no file of weights, or is damaged") from error
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no file of weights, or is cut short or damaged") from error


def _check_sums(path: Path) -> None:
    """Refuse a file of `torch.save` of which a part has changed: PyTorch reads it without looking at its checksums."""
    if not path.is_file():
        return
    try:
        if not zipfile.is_zipfile(path):
            return  # the format before version 1.6 has no checksums
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError, ValueError) as error:
        raise UserError(f"{path} is no file of weights, or is cut short or damaged") from error
    if damaged is not None:
        raise UserError(f"{path} is damaged: the checksum of its part {damaged} does not match; copy it again")


def write_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write what `read_weights` reads, at once: as safetensors where the name says so."""
    values = {name: value.detach().clone().contiguous() for name, value in weights.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(path, values)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def _write(path: Path, values: dict[str, torch.Tensor]) -> None:
    if path.suffix != SAFETENSORS:
        WholeCheckpoints().save_checkpoint(values, path)
        return
    try:
        from safetensors.torch import save
    except ModuleNotFoundError as error:
        raise _absent(path) from error
    partial = path.with_name(f"{path.name}.partial")  # its own writer leaves a file of any name when it is killed
    try:
        partial.write_bytes(save(values))
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _absent(path: Path) -> UserError:
    return UserError(f"{path} needs safetensors: pip install 'wsi-trainer[encoders]'")


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    """A file of this format can hold nothing but tensors."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise _absent(path) from error
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is no file of safetensors, or is cut short or damaged") from error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint of a run."""
    content = read_weights(path)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise UserError(f"{path} is no checkpoint of a run: it has no state_dict; `wsi-train fit` writes them")
    return content | {"state_dict": present_weights(content["state_dict"])}


def present_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a checkpoint, those of earlier versions under their present names."""
    return {re.sub(r"^(task\.)?beside\.", r"\1auxiliary.", name): value for name, value in state.items()}
