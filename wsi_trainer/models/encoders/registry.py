"""The published encoders that a config may name.

Architecture, normalisation and width are those of the public loaders in TRIDENT and CONCH, of timm, and of published
descriptions; none was compared with a file of weights, which are not public. `mpp` is what TRIDENT's table of encoders
advises: 20x is 0.5. Some are trained at further resolutions; what could not be looked up is said in `unverified`.
`wsi-train doctor --encoder NAME --weights FILE` compares an entry with the file at hand.
"""

from __future__ import annotations

from difflib import get_close_matches

from wsi_trainer.errors import UserError
from wsi_trainer.models.encoders.entry import CLIP, HALF, Colours, Encoder

_BIOPTIMUS: tuple[Colours, Colours] = (0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517)
_HIBOU: tuple[Colours, Colours] = (0.7068, 0.5755, 0.722), (0.195, 0.2316, 0.1816)
_GATED = {"mlp_layer": "SwiGLUPacked", "act_layer": "silu"}
_VIRCHOW = {"init_values": 1e-5, "mlp_ratio": 5.3375, "global_pool": "", **_GATED}
_NO_DERIVATIVES = "CC-BY-NC-ND-4.0"
_KAIKO = "Kaiko, not commercial"
_FMS = "huggingface.co/1aurent, *.kaiko_ai_towards_large_pathology_fms"
_NATURAL = "natural images: it was not trained at a resolution of slides"


def _large(patch: int, registers: int = 0, layer: int = 1024) -> dict[str, int]:
    """The sizes of a ViT-L of transformers."""
    sizes = {"hidden_size": layer, "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": patch}
    return sizes | ({"num_register_tokens": registers} if registers else {})


ENCODERS: tuple[Encoder, ...] = (
    Encoder(
        name="uni", maker="timm", architecture="vit_large_patch16_224", arguments={"init_values": 1e-5},
        width=1024, licence=_NO_DERIVATIVES, source="huggingface.co/MahmoodLab/UNI", shapes="fbc5f9f93c251147",
    ),
    Encoder(
        name="uni2-h", maker="timm", architecture="vit_giant_patch14_224",
        arguments={
            "depth": 24, "num_heads": 24, "embed_dim": 1536, "mlp_ratio": 2.66667 * 2, "init_values": 1e-5,
            "no_embed_class": True, "reg_tokens": 8, **_GATED,
        },
        width=1536, licence=_NO_DERIVATIVES, source="huggingface.co/MahmoodLab/UNI2-h", shapes="c2f78be648988da8",
    ),
    Encoder(
        name="virchow", maker="timm", architecture="vit_huge_patch14_224", arguments=_VIRCHOW, vector="class and mean",
        width=2560, licence="Apache-2.0", source="huggingface.co/paige-ai/Virchow", shapes="7aa89f96d06f68e7",
    ),
    Encoder(
        name="virchow2", maker="timm", architecture="vit_huge_patch14_224", arguments={**_VIRCHOW, "reg_tokens": 4},
        vector="class and mean", width=2560, licence=_NO_DERIVATIVES, source="huggingface.co/paige-ai/Virchow2",
        shapes="722dbe35b3482937",
    ),
    Encoder(
        name="h-optimus-0", maker="timm", architecture="vit_giant_patch14_reg4_dinov2",
        arguments={"init_values": 1e-5, "global_pool": "token"}, colours=_BIOPTIMUS, width=1536, licence="Apache-2.0",
        source="huggingface.co/bioptimus/H-optimus-0", shapes="1e1b7f1a50fe09f9",
    ),
    Encoder(
        name="h-optimus-1", maker="timm", architecture="vit_giant_patch14_reg4_dinov2",
        arguments={"init_values": 1e-5, "global_pool": "token"}, colours=_BIOPTIMUS, width=1536,
        licence=_NO_DERIVATIVES, source="huggingface.co/bioptimus/H-optimus-1", shapes="1e1b7f1a50fe09f9",
    ),
    Encoder(
        name="prov-gigapath", maker="timm", architecture="vit_giant_patch14_dinov2",
        arguments={"patch_size": 16, "embed_dim": 1536, "depth": 40, "num_heads": 24, "mlp_ratio": 5.33334},
        width=1536, licence="Apache-2.0", source="huggingface.co/prov-gigapath/prov-gigapath",
        shapes="bd50de323c5cb8ea",
    ),
    Encoder(
        name="conch", maker="conch", architecture="vit_base_patch16_224", size=448, colours=CLIP, width=512,
        licence=_NO_DERIVATIVES, source="huggingface.co/MahmoodLab/CONCH", shapes="ee070edf97fdbdfa",
    ),
    Encoder(
        name="conch-v1.5", maker="conch 1.5", architecture="vit_large_patch16_224", arguments={"init_values": 1.0},
        size=448, width=768, licence=_NO_DERIVATIVES, source="huggingface.co/MahmoodLab/conchv1_5",
        shapes="e6f72d6605dc5566",
        unverified="that its blocks scale their layers (init_values); its normalisation, taken to be ImageNet's",
    ),
    Encoder(
        name="phikon", maker="transformers", architecture="ViT", vector="class", width=768,
        licence="Owkin, not commercial", source="huggingface.co/owkin/phikon", shapes="1c2494847c25808d",
    ),
    Encoder(
        name="phikon-v2", maker="transformers", architecture="Dinov2", arguments=_large(16), vector="class",
        width=1024, licence="Owkin, not commercial", source="huggingface.co/owkin/phikon-v2", shapes="f065eb83aecd1087",
    ),
    Encoder(
        name="hibou-b", maker="transformers", architecture="Dinov2WithRegisters",
        arguments={"patch_size": 14, "num_register_tokens": 4}, vector="class", colours=_HIBOU, width=768,
        licence="Apache-2.0", source="huggingface.co/histai/hibou-b", shapes="f19f2467177f2735",
        unverified="the names of its parameters, which its own code defines",
    ),
    Encoder(
        name="hibou-l", maker="transformers", architecture="Dinov2WithRegisters", arguments=_large(14, 4),
        vector="class", colours=_HIBOU, width=1024, licence="Apache-2.0", source="huggingface.co/histai/hibou-L",
        shapes="f7e1fe9893066d07", unverified="the names of its parameters, which its own code defines",
    ),
    Encoder(
        name="kaiko-vits16", maker="timm", architecture="vit_small_patch16_224", colours=HALF, width=384,
        licence=_KAIKO, source=_FMS, shapes="b754480f2ec1d4ab",
    ),
    Encoder(
        name="kaiko-vits8", maker="timm", architecture="vit_small_patch8_224", colours=HALF, width=384,
        licence=_KAIKO, source=_FMS, shapes="b64171f39988d743",
    ),
    Encoder(
        name="kaiko-vitb16", maker="timm", architecture="vit_base_patch16_224", colours=HALF, width=768,
        licence=_KAIKO, source=_FMS, shapes="9cf2dd63a9e874ec",
    ),
    Encoder(
        name="kaiko-vitb8", maker="timm", architecture="vit_base_patch8_224", colours=HALF, width=768,
        licence=_KAIKO, source=_FMS, shapes="c292d0b87274dd06",
    ),
    Encoder(
        name="kaiko-vitl14", maker="timm", architecture="vit_large_patch14_reg4_dinov2", colours=HALF, width=1024,
        licence=_KAIKO, source=_FMS, shapes="3a0b8d9c0756cbd3",
    ),
    Encoder(
        name="ctranspath", maker="ctranspath", architecture="swin_tiny_patch4_window7_224", mpp=1.0, width=768,
        licence="GPL-3.0", source="github.com/Xiyue-Wang/TransPath", shapes="f5464355a9a42aa7",
    ),
    Encoder(
        name="gpfm", maker="timm", architecture="vit_large_patch14_dinov2", arguments={"init_values": 1e-5},
        width=1024, licence="MIT", source="huggingface.co/majiabo/GPFM", shapes="5f539c307939e9e7",
    ),
    Encoder(
        name="resnet50", maker="timm", architecture="resnet50", width=2048, licence="BSD-3-Clause",
        source="huggingface.co/timm/resnet50.tv_in1k", shapes="c1f7fd3808aa49e7", unverified=_NATURAL,
    ),
    Encoder(
        name="dinov2-small", maker="timm", architecture="vit_small_patch14_dinov2", width=384, licence="Apache-2.0",
        source="huggingface.co/timm/vit_small_patch14_dinov2.lvd142m", shapes="07d25dba384e3f14", unverified=_NATURAL,
    ),
    Encoder(
        name="dinov2-base", maker="timm", architecture="vit_base_patch14_dinov2", width=768, licence="Apache-2.0",
        source="huggingface.co/timm/vit_base_patch14_dinov2.lvd142m", shapes="eb9b44fcd2ca1e7d", unverified=_NATURAL,
    ),
    Encoder(
        name="dinov2-large", maker="timm", architecture="vit_large_patch14_dinov2", width=1024, licence="Apache-2.0",
        source="huggingface.co/timm/vit_large_patch14_dinov2.lvd142m", shapes="5f539c307939e9e7", unverified=_NATURAL,
    ),
)  # fmt: skip


def is_encoder(name: str) -> bool:
    """Whether a published encoder has this name."""
    return name in _NAMED


def encoder_named(name: str) -> Encoder:
    """The entry of this name; an error with those that are near."""
    if is_encoder(name):
        return _NAMED[name]
    near = get_close_matches(name, _NAMED, n=3)
    hint = f"near are {', '.join(near)}" if near else "`wsi-train doctor --encoders` lists them"
    raise UserError(
        f"there is no encoder {name!r}; {hint}; what is no published encoder is timm:NAME, or an import path"
    )


_NAMED = {encoder.name: encoder for encoder in ENCODERS}
