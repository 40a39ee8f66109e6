"""Weights from a file, and what of it matched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wsi_trainer.errors import UserError
from wsi_trainer.models.low_rank import low_rank_names
from wsi_trainer.models.patch_encoder import PatchEncoder
from wsi_trainer.models.positions import as_timm, resampled, trunk_of
from wsi_trainer.models.weights import read_weights

WRAPPERS = ("state_dict", "model_state_dict", "model", "weights")
"""Under which keys files keep the weights themselves."""
PREFIXES = (
    "", "module.", "model.", "backbone.", "encoder.", "network.", "model.backbone.", "module.backbone.",
    "visual.", "vit.", "dinov2.", "teacher.", "teacher.backbone.", "student.",
)  # fmt: skip
"""What the names of weights begin with where the network was a part of another."""

INNER = ("", "network.", "encoder.", "encoder.network.")
"""What the names of a network's own parameters begin with where the file is of a part of it alone."""


NAMES = ("loaded", "missing", "unexpected", "mismatched", "resampled")


@dataclass(frozen=True)
class Match:
    """What became of the weights of a file and of the parameters of a network."""

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
        """Whether every tensor of the network is in the file, in its shape."""
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


def load_pretrained(module: nn.Module, path: Path) -> Match:
    """Put the weights of a file into a network, as far as names and shapes agree.

    The file is a state dictionary as `torch.save` or safetensors write it, or a checkpoint that holds one; names may
    carry the usual prefixes, and the file may be of the network's encoder alone. Position embeddings of a ViT for
    patches of another size are interpolated. An error where nothing at all agrees.
    """
    network = _network_of(module)
    found, match = compare(network, path)
    network.load_state_dict(found, strict=False)
    return match


def compare(module: nn.Module, path: Path) -> tuple[dict[str, Tensor], Match]:
    """Those weights of a file that fit a network, and what became of all of them; the network is not touched."""
    learnt = low_rank_names(module)
    own = {name: value for name, value in module.state_dict().items() if name not in learnt}
    given = _read(path)
    trunk = trunk_of(module)
    within = next((f"{name}." for name, part in module.named_modules() if part is trunk and name), "")
    ways = product(PREFIXES, INNER)
    readings = [_as_parts_of(given, prefix, inner, trunk, within, own) for prefix, inner in ways]
    found, unexpected = max(readings, key=lambda reading: len(reading[0].keys() & own.keys()))
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


def _network_of(module: nn.Module) -> nn.Module:
    """What a file of weights is of: the network that encodes patches, or the backbone itself."""
    return module.network if isinstance(module, PatchEncoder) else module  # type: ignore[return-value]


def _as_parts_of(
    given: Mapping[str, Tensor], prefix: str, inner: str, trunk: nn.Module, within: str, own: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The weights under a prefix, of a part of the network, by the network's own names, and the names of the others.

    A network whose vectors are given another form has its own weights in its trunk; files name them without.
    """
    found = {f"{inner}{name}": value for name, value in as_timm(_stripped(given, prefix), trunk).items()}
    named = {f"{within}{name}" if f"{within}{name}" in own else name: value for name, value in found.items()}
    return named, tuple(name for name in given if not name.startswith(prefix))


def _stripped(given: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"model.pretrained: there is no file {path}")
    try:
        content = read_weights(path)
    except UserError as error:
        raise UserError(f"model.pretrained: {error}") from error
    while isinstance(content, dict) and (key := next((k for k in WRAPPERS if isinstance(content.get(k), dict)), "")):
        content = content[key]
    tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, dict) else {}
    if not tensors:
        raise UserError(f"model.pretrained: {path} holds no named tensors")
    return tensors
