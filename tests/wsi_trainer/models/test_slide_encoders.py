"""Slide encoders are what their papers and public code define, written here in another way, and published files load
into them by name; in tiles they are trained as whole."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_plugin import LazyImage, TiledModule
from tests.exactness import assert_same_step
from wsi_trainer.errors import UserError
from wsi_trainer.explain.attribution import attribute
from wsi_trainer.models import (
    Chief,
    Feather,
    FrozenFeatures,
    GigaPath,
    Madeleine,
    MultiClassTask,
    PatchEncoder,
    Pooling,
    Prism,
    ResNet,
    SlideClassifier,
    Titan,
)
from wsi_trainer.models.encoders import ENCODERS, encoder_named, shapes_of
from wsi_trainer.models.slide_encoders.published import SLIDE_ENCODERS, SlideEncoder, check_published
from wsi_trainer.models.slide_encoders.titan import slopes_of
from wsi_trainer.models.weights import load_pretrained

D, PATCHES = 6, 23
HEADS: dict[str, Callable[[int], Pooling]] = {
    "chief": partial(Chief, width=8, hidden=4, dropout=0.0),
    "feather": partial(Feather, width=8, hidden=4, dropout=0.0),
    "madeleine": partial(Madeleine, width=8, heads=2, dropout=0.0, attention_dropout=0.0),
    "titan": partial(Titan, width=8, depth=2, heads=2, pool_heads=2),
    "gigapath": partial(GigaPath, width=16, depth=2, heads=4, segments=(4, 10, 99), ratios=(1, 2, 4), dropout=0.0),
    "prism": partial(Prism, width=8, latents=3, depth=3, blocks=2, heads=2),
}


def built(name: str) -> Pooling:
    torch.manual_seed(0)
    return HEADS[name](D).double().eval()


def bag(count: int = PATCHES) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of features, the map that a head is given, and places: a part of a grid whose corners are rounded."""
    torch.manual_seed(1)
    rows = torch.randn(count, D, dtype=torch.float64)
    number = torch.arange(count)
    places = torch.stack([number % 5 * 2, number // 5]).double() + 0.003 * torch.randn(2, count).sign() + 4.25
    return rows, rows.T[None, :, :, None].contiguous(), places[None, :, :, None]


def vector_of(head: Pooling, features: Tensor, places: Tensor) -> Tensor:
    return head(features, **({"places": places} if head.wants_places else {}))[0]


def gate(part: nn.Module, h: Tensor) -> Tensor:
    a, b, c = part.attention_a[0], part.attention_b[0], part.attention_c  # type: ignore[index]
    return c.weight[0] @ (torch.tanh(a.weight @ h + a.bias) / (1 + torch.exp(-(b.weight @ h + b.bias)))) + c.bias[0]


def weighed(scores: list[Tensor], values: list[Tensor]) -> Tensor:
    weights = [torch.exp(score) for score in scores]
    return sum((w * v for w, v in zip(weights, values)), torch.zeros(())) / sum(weights)


def test_chief_weighs_the_features_themselves() -> None:
    rows, features, places = bag(9)
    head = built("chief")
    layer, *_, attention = head.attention_net  # type: ignore[misc]
    scores = [gate(attention, (layer.weight @ h + layer.bias).clamp(min=0)) for h in rows]
    torch.testing.assert_close(vector_of(head, features, places), weighed(scores, list(rows)))


def test_feather_weighs_a_layer_of_the_features() -> None:
    rows, features, places = bag(9)
    head = built("feather")
    layer = head.patch_embed[0]  # type: ignore[index]
    inner = [(layer.weight @ h + layer.bias).clamp(min=0) for h in rows]
    scores = [gate(head.global_attn, h) for h in inner]
    torch.testing.assert_close(vector_of(head, features, places), weighed(scores, inner))


def test_madeleine_gives_each_head_every_second_entry() -> None:
    rows, features, places = bag(9)
    head = built("madeleine")
    inner = [head.wsi_embedders.pre_attn(h) for h in rows]  # type: ignore[operator, union-attr]
    found = torch.zeros(16, dtype=torch.float64)
    for number, attention in enumerate(head.wsi_embedders.attn):  # type: ignore[arg-type, union-attr]
        own = [h[number::2] for h in inner]
        found[number::2] = weighed([gate(attention, h) for h in own], own)
    projector = head.projector
    torch.testing.assert_close(vector_of(head, features, places), projector.weight @ found + projector.bias)  # type: ignore[operator]


def attended(
    q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Callable[[int], Tensor | float] = lambda _: 0.0
) -> Tensor:
    """Attention of (T, width) head by head."""
    parts = []
    for number, (a, b, c) in enumerate(zip(q.chunk(heads, 1), k.chunk(heads, 1), v.chunk(heads, 1))):
        parts.append(torch.softmax(a @ b.T / a.shape[1] ** 0.5 + bias(number), dim=1) @ c)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("twice", [False, True])
def test_titan_attends_by_distance_in_the_grid(twice: bool) -> None:
    rows, features, places = bag()
    head = built("titan")
    cells = [(number % 5 * 2, number // 5) for number in range(PATCHES)]
    if twice:  # the published code adds what lies in one cell
        places[0, :, 7, 0], cells = places[0, :, 2, 0], cells[:7] + cells[8:]
        rows = torch.cat([rows[:2], rows[2:3] + rows[7:8], rows[3:7], rows[8:]])
    x = torch.cat([head.cls_token[0], head.patch_embed(rows)])  # type: ignore[index, operator]
    distances = torch.zeros(len(x), len(x), dtype=torch.float64)
    for i, one in enumerate(cells):
        for j, other in enumerate(cells):
            distances[i + 1, j + 1] = math.dist(one, other)
    for block in head.blocks.modules_list:  # type: ignore[union-attr]
        q, k, v = block.attn.qkv(block.norm1(x)).chunk(3, dim=1)
        x = x + block.attn.proj(attended(q, k, v, 2, lambda number: -distances * (1 / 16, 1 / 256)[number]))
        x = x + block.mlp.fc2(functional.gelu(block.mlp.fc1(block.norm2(x))))
    pooler, keys = head.attn_pool_contrastive, head.attn_pool_contrastive.ln_k(head.norm(x))  # type: ignore[operator, union-attr]
    w, b = pooler.attn.in_proj_weight.chunk(3), pooler.attn.in_proj_bias.chunk(3)  # type: ignore[union-attr]
    given = (pooler.ln_q(pooler.query), keys, keys)  # type: ignore[operator]
    q, k, v = (t @ its.T + bias for t, its, bias in zip(given, w, b))
    torch.testing.assert_close(vector_of(head, features, places), pooler.attn.out_proj(attended(q, k, v, 2))[0])  # type: ignore[operator, union-attr]


def test_slopes_of_alibi_are_those_of_its_paper_for_eight_and_twelve_heads() -> None:
    assert slopes_of(8) == [2.0**-n for n in range(1, 9)]
    assert slopes_of(12) == pytest.approx([2.0**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def dilated(layer: nn.Module, x: Tensor, heads: int) -> Tensor:
    """LongNet's attention, by a list of the keys of each token and head in each branch; a key of zeros is a filler."""
    q, k, v = (project(x).unflatten(1, (heads, -1)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))  # type: ignore[operator]
    count, d = len(x), q.shape[2]
    rows = []
    for token in range(count):
        for head in range(heads):
            found, sums = [], []
            for segment, ratio in layer.branches:  # type: ignore[union-attr]
                segment = min(segment, count)
                first, group = token // segment * segment, head // (heads // ratio)
                if (token - first) % ratio != group:
                    continue
                whole = -(-segment // ratio) * ratio
                places = [first + at if at < segment else count for at in range(group, whole, ratio)]
                keys, values = (
                    torch.stack([t[at, head] if at < count else t.new_zeros(d) for at in places]) for t in (k, v)
                )
                scores = keys @ q[token, head] / d**0.5
                found.append(torch.softmax(scores, 0) @ values)
                sums.append(torch.logsumexp(scores, 0).detach())
            weights = torch.softmax(torch.stack(sums), 0)
            rows.append(sum(w * f for w, f in zip(weights, found)))
    mixed = torch.stack(rows).view(count, -1)  # type: ignore[arg-type]
    return layer.out_proj(layer.inner_attn_ln(mixed))  # type: ignore[operator]


def test_gigapath_is_dilated_attention_over_patches_with_a_code_of_their_places() -> None:
    rows, features, places = bag()
    head = built("gigapath")
    codes = []
    for number in range(PATCHES):
        column, row = 4 + number % 5 * 2, 4 + number // 5
        angles = [along * 10000 ** (-step / 4) for along in (row, column) for step in range(4)]
        codes.append([f(a) for part in (angles[:4], angles[4:]) for f in (math.sin, math.cos) for a in part])
    x = head.patch_embed.proj(rows) + torch.tensor(codes, dtype=torch.float64)  # type: ignore[operator, union-attr]
    x = torch.cat([head.cls_token[0], x])  # type: ignore[index]
    for layer in head.encoder.layers:  # type: ignore[union-attr]
        x = x + dilated(layer.self_attn, layer.self_attn_layer_norm(x), 4)
        ffn = layer.ffn
        x = x + ffn.fc2(ffn.ffn_layernorm(functional.gelu(ffn.fc1(layer.final_layer_norm(x)))))
    expected = head.norm(head.encoder.layer_norm(x)[1:].mean(0))  # type: ignore[operator, union-attr]
    found = vector_of(head, features, places)
    torch.testing.assert_close(found, expected)
    parameters = list(head.parameters())
    for a, b in zip(*(torch.autograd.grad(v.sin().sum(), parameters, allow_unused=True) for v in (found, expected))):
        torch.testing.assert_close(a, b)


def test_prism_asks_the_patches_by_its_second_weights_from_the_second_time_on() -> None:
    rows, features, places = bag(9)
    head = built("prism")
    perceiver = head.perceiver
    x = perceiver.latents  # type: ignore[union-attr]
    for number in range(3):
        part = perceiver.layers[min(number, 1)]["xattn"]  # type: ignore[index, union-attr]
        asks = part["xattn"]  # type: ignore[index]
        key, value = asks.to_kv(rows).chunk(2, dim=1)
        x = x + asks.to_out(attended(asks.to_q(asks.x_norm(x)), key, value, 1))
        blocks = perceiver.layers[0]["tf"]  # type: ignore[index, union-attr]
        for step in (part["ff"], *(inner for block in blocks for inner in (block["mhsa"], block["ff"]))):  # type: ignore[index]
            normed = step.norm(x)
            if hasattr(step, "mha"):
                q, k, v = (normed @ w.T for w in step.mha.in_proj_weight.chunk(3))
                x = x + attended(q, k, v, 2) @ step.mha.out_proj.weight.T
            else:
                inner, gates = step.net[0](normed).chunk(2, dim=1)
                x = x + step.net[2](inner * functional.gelu(gates))
    torch.testing.assert_close(vector_of(head, features, places), head.cls_norm(x[0]))  # type: ignore[operator]


# Trained and asked in tiles.


@pytest.mark.parametrize("name", HEADS)
def test_a_slide_encoder_is_trained_in_tiles_as_whole(name: str) -> None:
    torch.manual_seed(0)
    plain = SlideClassifier(backbone=FrozenFeatures(D), head=HEADS[name], task=MultiClassTask("abc")).double()
    network = copy.deepcopy(plain)
    _, features, places = bag()
    expected = plain.task.loss(plain(features, places=places), torch.tensor([1]))
    tiled = TiledModule(network, tiles=(4, 1))
    actual = network.task.loss(tiled(LazyImage.from_tensor(features), places=places), torch.tensor([1]))
    assert "run whole" not in str(tiled.plan)
    assert_same_step(plain, network, expected, actual)


@pytest.mark.parametrize("name", ["titan", "gigapath"])
def test_it_is_trained_together_with_the_encoder_of_its_patches(name: str) -> None:
    torch.manual_seed(0)
    encoder = PatchEncoder(ResNet((D,), norm="group"), 16)
    plain = SlideClassifier(backbone=encoder, head=HEADS[name]).double()
    network = copy.deepcopy(plain)
    patches, places = torch.randint(0, 256, (PATCHES, 3, 16, 16), dtype=torch.uint8), bag()[2]
    expected = plain.task.loss(plain(patches, places=places), torch.tensor([1]))
    tiled = TiledModule(network, tiles=(1, 1, 4))
    actual = network.task.loss(tiled(LazyImage.from_tensor(patches), places=places), torch.tensor([1]))
    assert_same_step(plain, network, expected, actual)


@pytest.mark.parametrize("name", [name for name in HEADS if name != "gigapath"])
def test_its_attention_is_a_share_of_each_patch(name: str) -> None:
    torch.manual_seed(0)
    model = SlideClassifier(backbone=FrozenFeatures(D), head=HEADS[name]).double().eval()
    _, features, places = bag()
    if name == "titan":
        places[0, :, 7, 0] = places[0, :, 2, 0]
    with torch.no_grad():
        expected = model.scores(features, places=places).flatten().softmax(0)
    found = attribute(model, LazyImage.from_tensor(features), 0, "attention", places=places, budget="2MiB").values
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-9, atol=1e-12)
    if name == "chief":
        torch.testing.assert_close(expected @ features[0, :, :, 0].T, vector_of(model.head, features, places))
    assert not built("gigapath").attends


# Published weights.


@pytest.mark.parametrize("entry", SLIDE_ENCODERS, ids=lambda entry: entry.name)
def test_an_entry_is_of_its_network_and_of_an_encoder_of_patches(entry: SlideEncoder) -> None:
    network = entry.outline()
    assert shapes_of(network) == entry.shapes
    assert network.out_channels == entry.width
    assert encoder_named(entry.encoder).width == entry.channels
    assert entry.name not in {encoder.name for encoder in ENCODERS}


PREFIXES = {
    "titan": "vision_encoder.",
    "gigapath": "",
    "prism": "image_resampler.",
    "chief": "",
    "feather": "model.",
    "madeleine": "module.",
}


@pytest.mark.parametrize("name", HEADS)
def test_a_published_file_is_loaded_by_name(name: str, tmp_path: Path) -> None:
    """The file has further tensors; of those that parts share it has one, as safetensors does."""
    head, other = built(name), HEADS[name](D).double()
    tensors: dict[int, tuple[str, Tensor]] = {}
    for own, value in head.state_dict(keep_vars=True).items():
        tensors.setdefault(id(value), (own, value.detach()))
    state = {PREFIXES[name] + own: value for own, value in tensors.values()} | {"text_encoder.x": torch.ones(3)}
    torch.save({"model": state} if name == "gigapath" else state, tmp_path / "slide_encoder.pth")
    match = load_pretrained(other, tmp_path / "slide_encoder.pth")
    assert match.fits and match.unexpected == ("text_encoder.x",)
    for own, value in other.state_dict().items():
        assert torch.equal(value, head.state_dict()[own])


def test_a_frozen_slide_encoder_has_its_weights_and_no_dropout_and_learns_nothing(tmp_path: Path) -> None:
    torch.save(built("feather").state_dict(), tmp_path / "model.pt")
    make = partial(Feather, width=8, hidden=4)
    model = SlideClassifier(
        backbone=FrozenFeatures(D), head=make, head_pretrained=tmp_path / "model.pt", finetune_head="none"
    )  # fmt: skip
    with pytest.raises(UserError, match=r"weights are for vectors of conch-v1.5 \(768\).* FrozenFeatures makes 6"):
        model.load_pretrained_head()
    load_pretrained(model.head, tmp_path / "model.pt")
    model.train()
    assert not model.head.training and not any(p.requires_grad for p in model.head.parameters())
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["classifier.weight", "classifier.bias"]
    with pytest.raises(ValueError, match="head would keep random weights"):
        SlideClassifier(head=make, finetune_head="none")


def test_the_encoder_of_the_patches_has_to_be_that_of_the_slide_encoder() -> None:
    class Encoder(PatchEncoder):
        def __init__(self, name: str) -> None:
            nn.Module.__init__(self)
            self.published = encoder_named(name)

    titan = Titan(768, depth=1)
    with pytest.raises(UserError, match=r"Titan: its published weights are for vectors of conch-v1.5 \(768\).* uni "):
        check_published(Titan(1024, depth=1), 1024, Encoder("uni"))
    with pytest.warns(UserWarning, match="conch-v1.5 .*model.backbone is phikon"):
        check_published(titan, 768, Encoder("phikon"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_published(titan, 768, Encoder("conch-v1.5"))


def test_a_head_that_relates_patches_by_their_places_refuses_none() -> None:
    for name in ("titan", "gigapath"):
        model = SlideClassifier(backbone=FrozenFeatures(D), head=HEADS[name]).double()
        with pytest.raises(UserError, match="needs to know where patches lie"):
            model(bag()[1])
