"""What is known of a published encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Colours = tuple[float, float, float]
Vector = Literal["own", "class", "class and mean"]
"""What the vector of a patch is: what the network returns, its class token, or that beside the mean of the others."""

IMAGENET: tuple[Colours, Colours] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP: tuple[Colours, Colours] = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF: tuple[Colours, Colours] = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A published encoder: how its network is built, what it is shown, and whose it is."""

    name: str
    """What a config calls it."""
    maker: Literal["timm", "transformers", "conch", "conch 1.5", "ctranspath"]
    """What builds the network."""
    architecture: str
    """The model's name in timm, or the class of transformers."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the network is built with beyond its name."""
    vector: Vector = "own"
    size: int = 224
    """Pixels along a side of the patches that it was trained on, as the network takes them."""
    mpp: float = 0.5
    """Micrometres per pixel at which it is meant to be used."""
    colours: tuple[Colours, Colours] = IMAGENET
    """Mean and standard deviation of each colour, by which patches are normalised."""
    width: int
    """Entries of the vector of a patch."""
    licence: str
    source: str
    """Where its weights come from."""
    shapes: str
    """Checksum of the names and shapes of its parameters."""
    unverified: str = ""
    """What of this entry no public source was found for."""
