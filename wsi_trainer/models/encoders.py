"""Published encoders of patches: table, networks, and `PatchEncoder`, the backbone of a bag of patches.

No weights are here and none are fetched: a file is given as `model.pretrained`. Architecture, normalisation and width
are those of the public loaders in TRIDENT and CONCH, of timm, and of published descriptions; none was compared with a
file of weights, which are not public. `mpp` follows TRIDENT's table: 20x is 0.5. `unverified` names the facts of an
entry without a public source. `wsi-train doctor --encoder NAME --weights FILE` compares an entry with the file at hand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_trainer.errors import UserError
from wsi_trainer.models.backbones import answer, blocks_as_stages, import_timm, make_backbone, stages_of, timm_network

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


_BIOPTIMUS: tuple[Colours, Colours] = (0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517)
_LUNIT: tuple[Colours, Colours] = (0.70322989, 0.53606487, 0.66096631), (0.21716536, 0.26081574, 0.20723464)
_HIBOU: tuple[Colours, Colours] = (0.7068, 0.5755, 0.722), (0.195, 0.2316, 0.1816)
_GATED = {"mlp_layer": "SwiGLUPacked", "act_layer": "silu"}
_VIRCHOW = {"init_values": 1e-5, "mlp_ratio": 5.3375, "global_pool": "", **_GATED}
_NO_DERIVATIVES = "CC-BY-NC-ND-4.0"
_KAIKO = "Kaiko, not commercial"
_FMS = "huggingface.co/1aurent, *.kaiko_ai_towards_large_pathology_fms"
_NATURAL = "natural images: it was not trained at a resolution of slides"


_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
"""Sizes of a ViT-L of transformers."""

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
    ),
    Encoder(
        name="phikon", maker="transformers", architecture="ViT", vector="class", width=768,
        licence="Owkin, not commercial", source="huggingface.co/owkin/phikon", shapes="1c2494847c25808d",
    ),
    Encoder(
        name="phikon-v2", maker="transformers", architecture="Dinov2", vector="class", width=1024,
        arguments={**_LARGE, "patch_size": 16}, licence="Owkin, not commercial",
        source="huggingface.co/owkin/phikon-v2", shapes="f065eb83aecd1087",
    ),
    Encoder(
        name="hibou-b", maker="transformers", architecture="Dinov2WithRegisters",
        arguments={"patch_size": 14, "num_register_tokens": 4}, vector="class", colours=_HIBOU, width=768,
        licence="Apache-2.0", source="huggingface.co/histai/hibou-b", shapes="f19f2467177f2735",
        unverified="the names of its parameters, which its own code defines",
    ),
    Encoder(
        name="hibou-l", maker="transformers", architecture="Dinov2WithRegisters",
        arguments={**_LARGE, "patch_size": 14, "num_register_tokens": 4},
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
        name="midnight-12k", maker="transformers", architecture="Dinov2", vector="class and mean",
        arguments={
            "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "patch_size": 14,
            "use_swiglu_ffn": True,
        },
        colours=HALF, width=3072, licence="MIT", source="huggingface.co/kaiko-ai/midnight",
        shapes="71d66614c5dadceb",
    ),
    Encoder(
        name="openmidnight", maker="timm", architecture="vit_giant_patch14_reg4_dinov2",
        arguments={"init_values": 1e-5, "global_pool": "token"}, width=1536, licence="see its page",
        source="huggingface.co/SophontAI/OpenMidnight, teacher_checkpoint_load.pt", shapes="1e1b7f1a50fe09f9",
        unverified="its licence",
    ),
    Encoder(
        name="mstar", maker="timm", architecture="vit_large_patch16_224", arguments={"init_values": 1e-5}, width=1024,
        licence=_NO_DERIVATIVES, source="huggingface.co/Wangyh/mSTAR", shapes="fbc5f9f93c251147",
    ),
    Encoder(
        name="lunit-vits8", maker="timm", architecture="vit_small_patch8_224", colours=_LUNIT, width=384,
        licence="Lunit, not commercial", source="huggingface.co/1aurent/vit_small_patch8_224.lunit_dino",
        shapes="b64171f39988d743",
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
    """True for the name of a published encoder."""
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


def build_encoder(encoder: Encoder, size: int | None = None) -> nn.Module:
    """The network of an encoder: from patches, (K, 3, size, size), to a vector for each.

    Args:
        encoder: Which.
        size: Pixels along a side of a patch; by default what the encoder was trained on.
    """
    return _MAKERS[encoder.maker](encoder, size or encoder.size)


def shapes_of(network: nn.Module) -> str:
    """A checksum of the names and shapes of all that a network has learnt."""
    rows = sorted(f"{name} {tuple(value.shape)}" for name, value in network.state_dict().items())
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def from_transformers(folder: Path, size: int) -> nn.Module:
    """The vision model that the config.json of a folder describes; code that lies beside it is not run.

    Args:
        folder: Has a config.json, as `save_pretrained` writes it.
        size: Pixels along a side of a patch.
    """
    transformers = import_transformers()
    if not (folder / "config.json").is_file():
        raise UserError(f"model.backbone.network: {folder} has no config.json, which describes a model of transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.image_size = size
        return ClassToken(transformers.AutoModel.from_config(config, trust_remote_code=False))
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"model.backbone.network: {folder}/config.json describes no model of transformers ({reason})"
        ) from error


def import_transformers() -> Any:
    """The package, or an error that says how to get it."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'wsi-trainer[encoders]'") from error
    return transformers


def _timm(encoder: Encoder, size: int) -> nn.Module:
    arguments = _classes(encoder.arguments)
    sized = {} if encoder.architecture.startswith("resnet") else {"img_size": size}
    trunk = timm_network(encoder.architecture, **sized, **arguments)
    return ClassAndMean(trunk, int(trunk.num_prefix_tokens)) if encoder.vector == "class and mean" else trunk  # type: ignore[arg-type]


def _classes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """timm's arguments, with its own layers in place of their names."""
    made = dict(arguments)
    if "mlp_layer" in made:
        made["mlp_layer"] = getattr(import_timm().layers, made["mlp_layer"])
    return made


def _transformers(encoder: Encoder, size: int) -> nn.Module:
    transformers = import_transformers()
    config = getattr(transformers, f"{encoder.architecture}Config")(image_size=size, **encoder.arguments)
    pooling = {"add_pooling_layer": False} if encoder.architecture == "ViT" else {}
    trunk = getattr(transformers, f"{encoder.architecture}Model")(config, **pooling)
    return ClassToken(trunk, beside_mean=encoder.vector == "class and mean")


def _conch(encoder: Encoder, size: int) -> nn.Module:
    trunk = timm_network(encoder.architecture, img_size=size, global_pool="", **encoder.arguments)
    pooler = AttentionPooler if encoder.maker == "conch" else PlainAttentionPooler
    return Pooled(trunk, pooler(encoder.width, int(trunk.num_features)), encoder.width)  # type: ignore[arg-type]


def _ctranspath(encoder: Encoder, size: int) -> nn.Module:
    return timm_network(encoder.architecture, img_size=size, embed_layer=ConvolutionStem)


_MAKERS: dict[str, Callable[[Encoder, int], nn.Module]] = {
    "timm": _timm,
    "transformers": _transformers,
    "conch": _conch,
    "conch 1.5": _conch,
    "ctranspath": _ctranspath,
}


def outline(encoder: Encoder) -> nn.Module:
    """The network of an encoder without memory for its parameters."""
    with torch.device("meta"):
        return build_encoder(encoder)


class ClassAndMean(nn.Module):
    """A ViT whose vector of a patch is its class token, and beside it the mean of its patch tokens.

    Registers count for neither.
    """

    def __init__(self, trunk: nn.Module, before: int) -> None:
        """Keep the network.

        Args:
            trunk: Returns all tokens, (patches, tokens, width), the class token first.
            before: Tokens before those of the patch: the class token and the registers.
        """
        super().__init__()
        self.trunk = trunk
        self.before = before

    def forward(self, patches: Tensor) -> Tensor:
        tokens = self.trunk(patches)
        return torch.cat([tokens[:, 0], tokens[:, self.before :].mean(dim=1)], dim=-1)


class AttentionPooler(nn.Module):
    """One vector that asks all tokens of a patch by attention, as in CONCH."""

    def __init__(self, width: int, tokens: int, heads: int = 8) -> None:
        """Build the layers.

        Args:
            width: Entries of the vector.
            tokens: Entries of a token.
            heads: Heads of the attention.
        """
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, width))
        self.attn = nn.MultiheadAttention(width, heads, kdim=tokens, vdim=tokens, batch_first=True)
        self.ln_q = nn.LayerNorm(width)
        self.ln_k = nn.LayerNorm(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        keys = self.ln_k(tokens)
        queries = self.ln_q(self.query).expand(tokens.shape[0], 1, -1)
        return self.attn(queries, keys, keys, need_weights=False)[0][:, 0]


class PlainAttentionPooler(nn.Module):
    """The same without biases, its keys and values made by one matrix, as in CONCH 1.5."""

    def __init__(self, width: int, tokens: int, heads: int = 8) -> None:
        """Build the layers.

        Args:
            width: Entries of the vector.
            tokens: Entries of a token.
            heads: Heads of the attention.
        """
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(torch.randn(1, width))
        self.ln_k = nn.LayerNorm(tokens)
        self.ln_q = nn.LayerNorm(width)
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_kv = nn.Linear(tokens, 2 * width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        query = self.to_q(self.ln_q(self.query)).expand(tokens.shape[0], 1, -1)
        key, value = self.to_kv(self.ln_k(tokens)).chunk(2, dim=-1)
        parts = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key, value)]
        pooled = functional.scaled_dot_product_attention(*parts)
        return self.to_out(pooled.transpose(1, 2).flatten(2))[:, 0]


class Pooled(nn.Module):
    """A ViT whose tokens are pooled by attention, and normalised."""

    def __init__(self, trunk: nn.Module, pooler: nn.Module, width: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.attn_pool_contrast = pooler
        self.ln_contrast = nn.LayerNorm(width)

    def forward(self, patches: Tensor) -> Tensor:
        return self.ln_contrast(self.attn_pool_contrast(self.trunk(patches)))


class ClassToken(nn.Module):
    """A vision model of transformers whose vector of a patch is its class token, and the mean of the others beside it
    where that is asked for, of a model without registers.
    """

    def __init__(self, trunk: nn.Module, beside_mean: bool = False) -> None:
        super().__init__()
        self.trunk = trunk
        self.beside_mean = beside_mean

    def forward(self, patches: Tensor) -> Tensor:
        tokens: Tensor = self.trunk(patches).last_hidden_state
        return torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=-1) if self.beside_mean else tokens[:, 0]


class ConvolutionStem(nn.Module):
    """Two convolutions of stride 2 with BatchNorm, and one of 1 × 1: from pixels to a map of a quarter of their side.

    It stands where timm's Swin transformer has its patch embedding, and is called as that is.
    """

    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        embed_dim: int = 96,
        norm_layer: Callable[[int], nn.Module] | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if patch_size != 4:
            raise ValueError(f"patch_size is {patch_size}; the stem makes positions of 4 × 4 pixels")
        self.grid_size = (img_size // patch_size, img_size // patch_size)
        narrow, wide = embed_dim // 8, embed_dim // 4
        self.proj = nn.Sequential(
            nn.Conv2d(in_chans, narrow, 3, 2, 1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, wide, 3, 2, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, embed_dim, 1),
        )
        self.norm = nn.Identity() if norm_layer is None else norm_layer(embed_dim)

    def forward(self, patches: Tensor) -> Tensor:
        return self.norm(self.proj(patches).permute(0, 2, 3, 1))


class PatchEncoder(nn.Module):
    """Encodes each patch of a bag (`data.patches`) to one vector; the head then pools over the patches.

    From (K, 3, size, size) to a map (1, out_channels, K, 1), of which each position is a patch: every head works on it.
    Where the network returns a map of features for a patch, its mean is the vector.

    Attributes:
        bags: Says that the input is a bag and not an image.
    """

    bags = True
    stride = 1

    def __init__(
        self,
        network: nn.Module | str | None = None,
        size: int | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Build the encoder.

        Args:
            network: Any network that makes a vector or a map of features of an image: a published encoder such as
                uni2-h (`wsi-train doctor --encoders` lists them), timm:NAME (ViTs too), transformers:FOLDER with the
                config.json of a vision model, a class of this package such as ResNet, or the import path of any other;
                a small VGG by default.
            size: Pixels along a side of a patch, as `data.patches.size`; by default what a published encoder was
                trained on, or 224.
            arguments: Further arguments of a network of timm, such as img_size or dynamic_img_size.
        """
        super().__init__()
        kind, _, named = network.partition(":") if isinstance(network, str) else ("", "", "")
        if arguments and kind != "timm":
            raise ValueError("model.backbone.arguments are those of a network of timm; give others where it is named")
        self.published = encoder_named(kind) if is_encoder(kind) or (kind and not named and "." not in kind) else None
        self.size = size or (224 if self.published is None else self.published.size)
        if self.published is not None:
            self.network = _built(self.published, self.size)
        elif kind == "transformers":
            self.network = from_transformers(Path(named), self.size)
        else:
            self.network = timm_network(named, **(arguments or {})) if kind == "timm" else make_backbone(network)
        self.out_channels = _length_of_vector(self.network, self.size)

    @property
    def colours(self) -> tuple[Colours, Colours] | None:
        """Mean and standard deviation of each colour that a published encoder was trained with."""
        return None if self.published is None else self.published.colours

    def forward(self, patches: Tensor) -> Tensor:
        return self.vectors(patches).t()[None, :, :, None]

    def vectors(self, patches: Tensor) -> Tensor:
        """The vectors of patches, (patches, out_channels)."""
        found: Tensor = self.network(patches)
        return found.mean(dim=(2, 3)) if found.ndim == 4 else found

    def stages(self) -> list[nn.Module]:
        """The stages of the network; each block of a ViT is one."""
        own = callable(getattr(self.network, "stages", None))
        return stages_of(self.network) if own else blocks_as_stages(self.network)


def _built(encoder: Encoder, size: int) -> nn.Module:
    """The network of a published encoder; an error where it takes no patches of this size."""
    try:
        return build_encoder(encoder, size)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"model.backbone: {encoder.name} takes no patches of {size} × {size} ({error}); it was trained on "
            f"{encoder.size} × {encoder.size}"
        ) from error


def _length_of_vector(network: nn.Module, size: int) -> int:
    """Entries of a patch's vector, found by asking the network with two patches."""
    name = type(network).__name__
    try:
        out = answer(network, 2, size)
    except Exception as error:  # the network's own code: whatever it raises, it does not take such a patch
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"model.backbone: the network {name} does not take patches of {size} × {size} ({reason}); set "
            "model.backbone.size and data.patches.size to what it takes, or give a ViT of timm the argument img_size"
        ) from error
    if not isinstance(out, Tensor) or out.ndim not in (2, 4) or out.shape[0] != 2:
        returned = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise UserError(
            f"model.backbone: the network {name} returns {returned} for two patches; it must return a vector for each, "
            "(patches, features), or a map; wrap it in a module that picks one"
        )
    return int(out.shape[1])
