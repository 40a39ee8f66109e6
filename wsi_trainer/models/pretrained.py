"""Weights from a file, and what of it matched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wsi_trainer.errors import UserError
from wsi_trainer.models.weights import read_weights

WRAPPERS = ("state_dict", "model_state_dict", "model", "weights")
"""Under which keys files keep the weights themselves."""
PREFIXES = ("", "module.", "model.", "backbone.", "encoder.", "network.", "model.backbone.", "module.backbone.")
"""What the names of weights begin with where the network was a part of another."""

INNER = ("", "network.", "encoder.", "encoder.network.")
"""What the names of a network's own parameters begin with where the file is of a part of it alone."""


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

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        lines = [f"weights of {self.path}: {len(self.loaded)} of the network's {total} tensors loaded"]
        for name in ("missing", "unexpected", "mismatched"):
            names = getattr(self, name)
            if names:
                lines.append(f"  {len(names)} {name}: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": str(self.path),
            **{name: list(getattr(self, name)) for name in ("loaded", "missing", "unexpected", "mismatched")},
        }


def load_pretrained(module: nn.Module, path: Path) -> Match:
    """Put the weights of a file into a network, as far as names and shapes agree.

    The file is a state dictionary as `torch.save` writes it, or a checkpoint that holds one; names may carry the usual
    prefixes, and the file may be of the network's encoder alone. An error where nothing at all agrees.
    """
    given = _read(path)
    own = module.state_dict()
    prefix, inner = max(product(PREFIXES, INNER), key=lambda ways: _agreeing(given, own, *ways))
    found = {inner + name: value for name, value in _stripped(given, prefix).items()}
    shared = found.keys() & own.keys()
    fitting = {name for name in shared if found[name].shape == own[name].shape}
    if not fitting:
        raise UserError(
            f"{path}: none of its {len(given)} tensors fits the network {type(module).__name__}; the file begins with "
            f"{next(iter(given))}, the network with {next(iter(own), 'nothing')}"
        )
    module.load_state_dict({name: found[name] for name in fitting}, strict=False)
    return Match(
        path,
        loaded=tuple(name for name in own if name in fitting),
        missing=tuple(name for name in own if name not in shared),
        unexpected=tuple(
            name for name in given if inner + name.removeprefix(prefix) not in own or not name.startswith(prefix)
        ),
        mismatched=tuple(
            f"{name} {tuple(found[name].shape)} for {tuple(own[name].shape)}"
            for name in own
            if name in shared and name not in fitting
        ),
    )


def _agreeing(given: Mapping[str, Tensor], own: Mapping[str, Tensor], prefix: str, inner: str) -> int:
    """How many names agree if those of the file begin with the one, and those of the network with the other."""
    return len(_stripped(given, prefix).keys() & _stripped(own, inner).keys())


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
