"""Published slide encoders: table, and whether the patches that one is given are those that it was trained on.

No weights are here: a file is given as `model.head_pretrained`. Architectures, sizes and names of parameters are those
of public code and of published descriptions; none was compared with a file of weights. `unverified` names the facts of
an entry without a public source. `wsi-train doctor --encoder NAME --weights FILE` compares an entry with the file at
hand.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import nn

from wsi_trainer.errors import UserError
from wsi_trainer.models.encoders import PatchEncoder
from wsi_trainer.models.heads import Pooling
from wsi_trainer.models.slide_encoders import Chief, Feather, GigaPath, Madeleine, Prism, Titan


@dataclass(frozen=True, kw_only=True)
class SlideEncoder:
    """A published slide encoder: its head, the patches that it was trained on, and whose it is."""

    name: str
    head: type[Pooling]
    encoder: str
    """The encoder of its patches, by the name that it has here."""
    size: int
    """Pixels along a side of its patches."""
    mpp: float
    """Micrometres per pixel of its patches."""
    channels: int
    """Entries of the vector of a patch."""
    width: int
    """Entries of the vector of a slide."""
    licence: str
    source: str
    """Where its weights come from."""
    shapes: str
    """Checksum of the names and shapes of the parameters that make the vector."""
    unverified: str = ""
    """What of this entry no public source was found for."""

    def outline(self) -> nn.Module:
        """The network without memory for its parameters."""
        with torch.device("meta"):
            return self.head(self.channels)


_NO_DERIVATIVES = "CC-BY-NC-ND-4.0"
_FEATHER = "huggingface.co/MahmoodLab/abmil.base.{}.pc108-24k"

SLIDE_ENCODERS: tuple[SlideEncoder, ...] = (
    SlideEncoder(
        name="titan", head=Titan, encoder="conch-v1.5", size=512, mpp=0.5, channels=768, width=768,
        licence=_NO_DERIVATIVES, source="huggingface.co/MahmoodLab/TITAN", shapes="04589eabd014fd1d",
        unverified="the code of its network, of which copies were read; its config and 48.5 M parameters agree",
    ),
    SlideEncoder(
        name="gigapath", head=GigaPath, encoder="prov-gigapath", size=256, mpp=0.5, channels=1536, width=768,
        licence="Apache-2.0", source="huggingface.co/prov-gigapath/prov-gigapath, slide_encoder.pth",
        shapes="4f9852d88284ca77",
        unverified="the order of patches that it was trained with; its 86.3 M parameters agree",
    ),
    SlideEncoder(
        name="prism", head=Prism, encoder="virchow", size=224, mpp=0.5, channels=2560, width=1280,
        licence=_NO_DERIVATIVES, source="huggingface.co/paige-ai/Prism", shapes="473f2dff639a04c7",
        unverified="the code of its network, of which copies were read, and its config, of which only defaults were",
    ),
    SlideEncoder(
        name="chief", head=Chief, encoder="ctranspath", size=256, mpp=1.0, channels=768, width=768,
        licence="AGPL-3.0", source="github.com/hms-dbmi/CHIEF, CHIEF_pretraining.pth", shapes="927558948fa2de92",
        unverified="that the CTransPath of its patches, CHIEF_CTransPath.pth, is the one of TransPath",
    ),
    SlideEncoder(
        name="madeleine", head=Madeleine, encoder="conch", size=256, mpp=1.0, channels=512, width=512,
        licence=_NO_DERIVATIVES, source="huggingface.co/MahmoodLab/madeleine, model.pt", shapes="001ea1cf9e7fe83f",
        unverified="its numbers of heads and entries, which its config has; those of its scripts for training are here",
    ),
    SlideEncoder(
        name="feather", head=Feather, encoder="conch-v1.5", size=512, mpp=0.5, channels=768, width=512,
        licence=_NO_DERIVATIVES, source=_FEATHER.format("conch_v15"), shapes="60e8e1bd517ad99c",
    ),
    SlideEncoder(
        name="feather-uni2-h", head=Feather, encoder="uni2-h", size=256, mpp=0.5, channels=1536, width=512,
        licence=_NO_DERIVATIVES, source=_FEATHER.format("uni_v2"), shapes="e4d2a1cf04d5c0a4",
    ),
    SlideEncoder(
        name="feather-uni", head=Feather, encoder="uni", size=256, mpp=0.5, channels=1024, width=512,
        licence=_NO_DERIVATIVES, source=_FEATHER.format("uni"), shapes="ccfc4f82bee51f94",
    ),
)  # fmt: skip


def slide_encoder_named(name: str) -> SlideEncoder | None:
    """The entry of this name, if there is one."""
    return next((entry for entry in SLIDE_ENCODERS if entry.name == name), None)


def check_published(head: Pooling, channels: int, backbone: nn.Module) -> None:
    """Refuse patches whose vectors the weights of a published slide encoder cannot be for, and warn of those of another
    encoder.

    Args:
        head: The head that is to have the weights.
        channels: Entries of the vector of a patch.
        backbone: Makes it.
    """
    entries = [entry for entry in SLIDE_ENCODERS if type(head) is entry.head]
    if not entries:
        return
    published = backbone.published if isinstance(backbone, PatchEncoder) else None
    given = type(backbone).__name__ if published is None else published.name
    wanted = " or ".join(f"{entry.encoder} ({entry.channels})" for entry in entries)
    fitting = [entry for entry in entries if entry.channels == channels]
    if not fitting:
        raise UserError(
            f"model.head {type(head).__name__}: its published weights are for vectors of {wanted}, and model.backbone "
            f"{given} makes {channels} entries; take that encoder, or leave out model.head_pretrained"
        )
    if published is not None and given not in {entry.encoder for entry in fitting}:
        warnings.warn(
            f"model.head {type(head).__name__}: its published weights are for vectors of {wanted}, and model.backbone "
            f"is {given}: to these weights its vectors are noise",
            UserWarning, stacklevel=2,
        )  # fmt: skip
