"""Files of weights and checkpoints: numbers only, whoever wrote them, loaded as far as they fit a network.

PyTorch's files are pickles, and a pickle may name any function and have it called. So only tensors and plain values are
read, in every command, and a file that holds more is refused.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wsi_trainer.errors import UserError
from wsi_trainer.models.backbones import FrozenFeatures, import_timm
from wsi_trainer.models.encoders import PatchEncoder
from wsi_trainer.models.finetune import low_rank_names, merge_low_rank
from wsi_trainer.models.hub import downloaded

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
        from lightning_plugin import WholeCheckpoints  # who reads weights alone needs no Lightning

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
    return UserError(f"{path} needs safetensors: pip install 'wsi-trainer[hub]'")


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
    refuse_nan(path, content["state_dict"])
    return content | {"state_dict": present_weights(content["state_dict"])}


def refuse_nan(path: Path, weights: Mapping[str, Any]) -> None:
    """Refuse weights that are no numbers: all that a network computes with them is none either."""
    for name, value in weights.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.isnan().any():
            raise UserError(
                f"{path}: the weight {name} is NaN: the training that wrote it had diverged; take an earlier "
                "checkpoint, or train again with a lower model.learning_rate"
            )


def present_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a checkpoint, those of earlier versions under their present names."""
    names = {name: re.sub(r"^(task\.)?beside\.", r"\1auxiliary.", name) for name in state}
    if any(name.startswith("auxiliary.") for name in names.values()):  # a target of the slide beside one of pixels
        places = {"task.auxiliary.": "task.tasks.1.", "task.": "task.tasks.0.", "auxiliary.": "slide_classifier."}
        for name, former in names.items():
            before = next((old for old in places if former.startswith(old)), "")
            names[name] = places.get(before, "") + former.removeprefix(before)
    return {names[name]: value for name, value in state.items()}


POSITIONS = ("pos_embed", "position_embeddings")


def trunk_of(module: nn.Module) -> nn.Module:
    """The network itself, out of what gives its vectors another form."""
    while isinstance(inner := getattr(module, "trunk", None), nn.Module):
        module = inner
    return module


def as_timm(given: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Weights as they are named today, where the network is timm's and timm knows how they were named before."""
    if type(module).__module__.partition(".")[0] != "timm":
        return given
    rename = getattr(sys.modules[type(module).__module__], "checkpoint_filter_fn", None)
    # Those of DINOv2's own code, and of a Swin transformer of timm before 0.9.
    old = "mask_token" in given or any(name.endswith("relative_position_index") for name in given)
    return rename(dict(given), module) if old and rename is not None else given


def resampled(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The position embeddings whose square has another side than the network's, interpolated to that.

    Tokens that stand before those of the patch keep theirs.
    """
    found = {}
    for name, value in given.items():
        if not name.endswith(POSITIONS) or name not in own or value.ndim != 3 or own[name].ndim != 3:
            continue
        there, here = value.shape[1], own[name].shape[1]
        before = [n for n in range(16) if _is_square(there - n) and _is_square(here - n)]
        if there != here and before and value.shape[2] == own[name].shape[2]:
            side = round((here - before[0]) ** 0.5)
            resample = import_timm().layers.resample_abs_pos_embed
            found[name] = resample(value, [side, side], num_prefix_tokens=before[0])
    return found


def _is_square(count: int) -> bool:
    return count > 0 and round(count**0.5) ** 2 == count


WRAPPERS = ("state_dict", "model_state_dict", "model", "weights")
"""Under which keys files keep the weights themselves."""
PREFIXES = (
    "", "module.", "model.", "backbone.", "encoder.", "network.", "model.backbone.", "module.backbone.",
    "visual.", "vit.", "dinov2.", "teacher.", "teacher.backbone.", "student.", "vision_encoder.", "image_resampler.",
)  # fmt: skip
"""What the names of weights begin with where the network was a part of another."""

INNER = ("", "network.", "encoder.", "encoder.network.")
"""What the names of a network's own parameters begin with where the file is of a part of it alone."""


NAMES = ("loaded", "missing", "unexpected", "mismatched", "resampled")


@dataclass(frozen=True)
class Match:
    """Match of a file's weights with a network's parameters."""

    path: Path
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """Of the network, not in the file: they keep their random values."""
    unexpected: tuple[str, ...]
    """Of the file, not in the network."""
    mismatched: tuple[str, ...]
    """In both, of another shape; also not loaded."""
    resampled: tuple[str, ...] = ()
    """Position embeddings that were made for patches of another size, and interpolated to this one."""

    @property
    def fits(self) -> bool:
        """True where every tensor of the network is in the file, in its shape."""
        return not self.missing and not self.mismatched

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        lines = [f"weights of {self.path}: {len(self.loaded)} of the network's {total} tensors loaded"]
        for name in ("missing", "unexpected", "mismatched", "resampled"):
            names = getattr(self, name)
            if names:
                lines.append(f"  {len(names)} {name}: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": str(self.path),
            **{name: list(getattr(self, name)) for name in NAMES},
        }


def load_pretrained(module: nn.Module, path: Path, key: str = "model.pretrained") -> Match:
    """Put the weights of a file into a network, as far as names and shapes agree.

    The file is a state dictionary as `torch.save` or safetensors write it, or a checkpoint that holds one; names may
    carry the usual prefixes, and the file may be of the network's encoder alone. Position embeddings of a ViT for
    patches of another size are interpolated. An error where nothing at all agrees.

    Args:
        module: The network, or a backbone with it.
        path: The file.
        key: The key of a config that gives it.
    """
    network = _network_of(module)
    found, match = compare(network, path, key)
    network.load_state_dict(found, strict=False)
    return match


def compare(module: nn.Module, path: Path, key: str = "model.pretrained") -> tuple[dict[str, Tensor], Match]:
    """Find the weights of a file that fit a network, which is not touched, and the match of all of them."""
    learnt = low_rank_names(module)
    own = {name: value for name, value in module.state_dict().items() if name not in learnt}
    given = _read(path, key)
    trunk = trunk_of(module)
    within = next((f"{name}." for name, part in module.named_modules() if part is trunk and name), "")
    ways = product(PREFIXES, INNER)
    readings = [_as_parts_of(given, prefix, inner, trunk, within, own) for prefix, inner in ways]
    found, unexpected = max(readings, key=lambda reading: len(reading[0].keys() & own.keys()))
    for names in _names_of_one(module):  # files may have a tensor that several parts share once
        if known := [found[name] for name in names if name in found]:
            found |= {name: found.get(name, known[0]) for name in names}
    fresh = resampled(found, own)
    found |= fresh
    shared = found.keys() & own.keys()
    fitting = {name for name in shared if found[name].shape == own[name].shape}
    if not fitting:
        raise UserError(
            f"{path}: none of its {len(given)} tensors fits the network {type(trunk).__name__}; the file begins with "
            f"{next(iter(given))}, the network with {next(iter(own), 'nothing')}"
        )
    match = Match(
        path,
        loaded=tuple(name for name in own if name in fitting),
        missing=tuple(name for name in own if name not in shared),
        unexpected=(*unexpected, *(name for name in found if name not in own)),
        mismatched=tuple(
            f"{name} {tuple(found[name].shape)} for {tuple(own[name].shape)}"
            for name in own
            if name in shared and name not in fitting
        ),
        resampled=tuple(fresh),
    )
    return {name: found[name] for name in fitting}, match


def _names_of_one(module: nn.Module) -> list[list[str]]:
    """The names of each tensor that several parts of a network share."""
    names: dict[int, list[str]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    return [these for these in names.values() if len(these) > 1]


def _network_of(module: nn.Module) -> nn.Module:
    """The network that a file of weights is of: the one that encodes patches, or the backbone itself."""
    return module.network if isinstance(module, PatchEncoder) else module  # type: ignore[return-value]


def _as_parts_of(
    given: Mapping[str, Tensor], prefix: str, inner: str, trunk: nn.Module, within: str, own: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The weights under a prefix, of a part of the network, by the network's own names, and the names of the others.

    A network whose vectors are given another form has its own weights in its trunk; files name them without.
    """
    under = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
    found = {f"{inner}{name}": value for name, value in as_timm(under, trunk).items()}
    named = {f"{within}{name}" if f"{within}{name}" in own else name: value for name, value in found.items()}
    return named, tuple(name for name in given if not name.startswith(prefix))


def _read(path: Path, key: str) -> dict[str, Tensor]:
    path = downloaded(path)
    if not path.is_file():
        raise UserError(f"{key}: there is no file {path}")
    try:
        content = read_weights(path)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    while isinstance(content, dict) and (inner := next((k for k in WRAPPERS if isinstance(content.get(k), dict)), "")):
        content = content[inner]
    tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, dict) else {}
    if not tensors:
        raise UserError(f"{key}: {path} holds no named tensors")
    refuse_nan(path, tensors)
    return tensors


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Put the weights of a checkpoint, or of the safetensors of an exported model, into the model."""
    if checkpoint.suffix == SAFETENSORS:
        weights = read_weights(checkpoint)
        refuse_nan(checkpoint, weights)
    else:
        weights = read_checkpoint(checkpoint)["state_dict"]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(
            f"{checkpoint} holds the weights of another network than the config's; use a checkpoint of this run"
        ) from error


def encoder_of(backbone: nn.Module) -> nn.Module:
    """The network that a run has trained, with low-rank matrices merged into its layers."""
    if isinstance(backbone, FrozenFeatures):
        raise UserError("model.backbone is FrozenFeatures: a run on features has no encoder to export")
    merge_low_rank(backbone)
    return _network_of(backbone)
