"""Heads of papers are what their papers define, written here sum by sum, and are trained in tiles as whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from lightning_plugin import LazyImage, TiledModule
from tests.exactness import assert_same_step
from wsi_trainer.explain.attribution import attribute
from wsi_trainer.models import (
    AttentionPooling,
    ClassAttentionPooling,
    DualStreamPooling,
    FrozenFeatures,
    MeanMLP,
    MultiClassTask,
    PatchEncoder,
    Pooling,
    ResNet,
    SlideClassifier,
    TransformerPooling,
    TransMILPooling,
)

D = 6
HEADS: dict[str, Callable[[int], Pooling]] = {
    "mean": partial(MeanMLP, hidden=5),
    "DSMIL": partial(DualStreamPooling, queries=4),
    "transformer": partial(TransformerPooling, width=8, heads=2),
    "TransMIL": partial(TransMILPooling, width=8, heads=2, landmarks=4, dropout=0.0),
}


def bag(count: int) -> tuple[Tensor, Tensor]:
    """Rows of features, and the map that a head is given."""
    torch.manual_seed(1)
    rows = torch.randn(count, D, dtype=torch.float64)
    return rows, rows.T[None, :, :, None].contiguous()


def built(name: str, outputs: int = 1) -> Pooling:
    torch.manual_seed(0)
    head = HEADS[name](D)
    head.attach(outputs)
    return head.double().eval()


def matrix(layer: torch.nn.Module) -> Tensor:
    return layer.weight.flatten(1)  # type: ignore[union-attr, operator]


def test_mean_mlp() -> None:
    rows, features = bag(7)
    head = built("mean")
    expected = sum((head.project.weight.flatten(1) @ h + head.project.bias).clamp(min=0) for h in rows) / 7  # type: ignore[union-attr, operator]
    torch.testing.assert_close(head(features)[0], expected)


def test_dsmil_asks_the_critical_patch_of_each_class() -> None:
    rows, features = bag(9)
    head = built("DSMIL", 3)
    found = head(features)[0].unflatten(0, (3, D + 1))
    for c in range(3):
        scores = [matrix(head.score)[c] @ h + head.score.bias[c] for h in rows]
        m = max(range(9), key=lambda i: float(scores[i].detach()))
        q = [matrix(head.query) @ h + head.query.bias for h in rows]
        weights = [math.exp(float(q[i] @ q[m])) for i in range(9)]
        b = sum(w * (matrix(head.value) @ h + head.value.bias) for w, h in zip(weights, rows)) / sum(weights)
        torch.testing.assert_close(found[c, :D], b)
        torch.testing.assert_close(found[c, D], scores[m])


def norm(x: Tensor, layer: torch.nn.LayerNorm) -> Tensor:
    middle = x - x.sum() / len(x)
    return middle / ((middle**2).sum() / len(x) + layer.eps) ** 0.5 * layer.weight + layer.bias


def test_transformer_is_attention_of_all_tokens_head_by_head() -> None:
    rows, features = bag(5)
    head = built("transformer")
    tokens = [head.token[0, 0], *(matrix(head.project) @ h + head.project.bias for h in rows)]
    for layer in head.layers.layers:
        normed = [norm(t, layer.norm1) for t in tokens]
        asked, kept, said = layer.self_attn.in_proj_weight.split(8)
        b_asked, b_kept, b_said = layer.self_attn.in_proj_bias.split(8)
        changed = []
        for t, x in zip(tokens, normed):
            parts = []
            for part in (slice(0, 4), slice(4, 8)):
                scores = [(asked @ x + b_asked)[part] @ (kept @ y + b_kept)[part] / 2 for y in normed]
                weights = torch.softmax(torch.stack(scores), 0)
                parts.append(sum(w * (said @ y + b_said)[part] for w, y in zip(weights, normed)))
            changed.append(t + layer.self_attn.out_proj(torch.cat(parts)))
        tokens = [t + layer.linear2(torch.nn.functional.gelu(layer.linear1(norm(t, layer.norm2)))) for t in changed]
    torch.testing.assert_close(head(features)[0], norm(tokens[0], head.layers.norm))


def nystrom(layer: torch.nn.Module, tokens: list[Tensor]) -> list[Tensor]:
    """Nyström attention, landmark by landmark; the pseudoinverse is that of linear algebra."""
    fill = -len(tokens) % 4
    padded = [torch.zeros(8, dtype=torch.float64)] * fill + tokens
    group = len(padded) // 4
    w_q, w_k, w_v = layer.qkv.weight.split(8)
    result = torch.zeros(len(padded), 8, dtype=torch.float64)
    for number, part in enumerate((slice(0, 4), slice(4, 8))):
        q = torch.stack([(w_q @ t)[part] / 2 for t in padded])
        k, v = (torch.stack([(w @ t)[part] for t in padded]) for w in (w_k, w_v))
        few_q, few_k = (torch.stack([x[i * group : (i + 1) * group].mean(0) for i in range(4)]) for x in (q, k))
        core = torch.softmax(few_q @ few_k.T, 1)
        mixed = torch.softmax(q @ few_k.T, 1) @ torch.linalg.pinv(core) @ torch.softmax(few_q @ k.T, 1) @ v
        kernel = layer.beside.weight[number, 0, :, 0]
        for i in range(len(padded)):
            for j in range(33):
                if 0 <= i + j - 16 < len(padded):
                    mixed[i] = mixed[i] + kernel[j] * v[i + j - 16]
        result[:, part] = mixed
    return [layer.out(row) for row in result[fill:]]


@pytest.mark.parametrize("count", [9, 7])
def test_transmil(count: int) -> None:
    rows, features = bag(count)
    head = built("TransMIL")
    for layer in head.attend:
        layer.iterations = 40  # until the iteration is the pseudoinverse
    patches = [(matrix(head.project) @ h + head.project.bias).clamp(min=0) for h in rows]
    tokens = [head.token[0, 0], *patches, *patches[: 9 - count]]
    tokens = [t + a for t, a in zip(tokens, nystrom(head.attend[0], [norm(t, head.norms[0]) for t in tokens]))]
    square, mixed = tokens[1:], [tokens[0]]
    for y in range(3):
        for x in range(3):
            here = square[3 * y + x]
            for convolution in head.convolutions:
                reach = convolution.kernel_size[0] // 2
                here = here + convolution.bias
                for v in range(3):
                    for u in range(3):
                        if max(abs(v - y), abs(u - x)) <= reach:
                            here = here + convolution.weight[:, 0, v - y + reach, u - x + reach] * square[3 * v + u]
            mixed.append(here)
    last = nystrom(head.attend[1], [norm(t, head.norms[1]) for t in mixed])
    torch.testing.assert_close(head(features)[0], norm(mixed[0] + last[0], head.norms[2]), rtol=1e-5, atol=1e-6)


# The one question of heads with attention.

ATTENTION = {
    **{name: make for name, make in HEADS.items() if name != "mean"},
    "gated": partial(AttentionPooling, hidden=4),
    "CLAM": partial(ClassAttentionPooling, hidden=4),
}


def shares(head: Pooling, features: Tensor) -> Tensor:
    """(branches, patches), from the scores."""
    scores = head.scores(features)
    assert scores.shape == (1, head.branches, *features.shape[2:])
    return torch.softmax(scores.flatten(2), -1)[0]


def test_shares_of_pooling_heads_are_the_weights_of_their_vectors() -> None:
    rows, features = bag(9)
    for name in ("gated", "CLAM", "DSMIL"):
        torch.manual_seed(0)
        head = ATTENTION[name](D)
        head.attach(3)
        head = head.double().eval()
        weighed = rows if name != "DSMIL" else rows @ matrix(head.value).T + head.value.bias  # type: ignore[union-attr, operator]
        vectors = head(features)[0].unflatten(0, (head.branches, -1))[:, :D]
        torch.testing.assert_close(shares(head, features) @ weighed, vectors)


def test_shares_of_a_transformer_are_what_its_class_token_gives_in_the_last_layer() -> None:
    rows, features = bag(5)
    head = built("transformer")
    tokens = torch.cat([head.token[0], rows @ matrix(head.project).T + head.project.bias])  # type: ignore[union-attr, operator, index]
    first, last = head.layers.layers  # type: ignore[union-attr, misc]
    normed = [norm(t, last.norm1) for t in first(tokens[None])[0]]
    (asked, kept, _), (b_asked, b_kept, _) = (
        last.self_attn.in_proj_weight.split(8),
        last.self_attn.in_proj_bias.split(8),
    )
    given = torch.zeros(6, dtype=torch.float64)
    for part in (slice(0, 4), slice(4, 8)):
        query = (asked @ normed[0] + b_asked)[part]
        given += torch.softmax(torch.stack([query @ (kept @ y + b_kept)[part] / 2 for y in normed]), 0) / 2
    torch.testing.assert_close(shares(head, features)[0], given[1:] / given[1:].sum())


@pytest.mark.parametrize("count", [9, 7])
def test_shares_of_transmil_are_what_its_class_token_gives_to_patches_and_their_repetitions(count: int) -> None:
    _, features = bag(count)
    head = built("TransMIL")
    seen: list[Tensor] = []
    layer = head.attend[1]  # type: ignore[index, union-attr]
    layer.iterations = 40
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    head(features)
    fill = -seen[0].shape[1] % 4
    padded = torch.cat([torch.zeros(fill, 8, dtype=torch.float64), seen[0][0]])
    given = torch.zeros(seen[0].shape[1], dtype=torch.float64)
    for part in (slice(0, 4), slice(4, 8)):
        q, k = (padded @ weight[part].T for weight in layer.qkv.weight.split(8)[:2])
        few_q, few_k = (x.unflatten(0, (4, -1)).mean(1) for x in (q / 2, k))
        core = torch.linalg.pinv(torch.softmax(few_q @ few_k.T, 1))
        given += (torch.softmax(q[fill] / 2 @ few_k.T, 0) @ core @ torch.softmax(few_q @ k.T, 1))[fill:] / 2
    given = given[1:]
    given = given[:count] + torch.cat([given[count:], torch.zeros(2 * count - len(given), dtype=torch.float64)])
    given = given.clamp(min=0)
    assert (given > 0).sum() > 1
    torch.testing.assert_close(shares(head, features)[0], given / given.sum(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTION)
def test_scores_of_features_are_those_of_their_patches(name: str) -> None:
    """A feature is a patch without pixels, also where the network is computed in tiles."""
    torch.manual_seed(0)
    size, task = 16, MultiClassTask(["a", "b", "c"])
    encoder = PatchEncoder(ResNet((4,), norm="group"), size)
    whole = SlideClassifier(backbone=encoder, head=ATTENTION[name], task=task)
    whole.double().eval()
    patches = torch.randint(0, 256, (11, 3, size, size), dtype=torch.uint8)
    with torch.no_grad():
        features = whole.backbone(whole.normalise(patches))
        expected = whole.scores(patches)
        assert expected.shape == (1, whole.head.branches, 11, 1)
        frozen = SlideClassifier(backbone=FrozenFeatures(encoder.out_channels), head=ATTENTION[name], task=task)
        frozen.head.load_state_dict(whole.head.state_dict())
        frozen.double().eval()
        assert torch.equal(frozen.scores(features), expected)
    for target in range(3):
        seen = attribute(whole, LazyImage.from_tensor(patches), target, "attention", budget="2MiB")
        found = attribute(frozen, LazyImage.from_tensor(features), target, "attention", budget="2MiB")
        its = expected[0, target if whole.head.branches > 1 else 0].softmax(0)
        for values in (seen.values, found.values):
            torch.testing.assert_close(values, its, rtol=1e-9, atol=1e-12)


def test_heads_without_attention_say_so() -> None:
    assert {name for name, make in HEADS.items() if not make(D).attends} == {"mean"}
    with pytest.raises(NotImplementedError, match="MeanMLP has no attention"):
        built("mean").scores(bag(3)[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_trained_in_tiles_as_whole(name: str) -> None:
    torch.manual_seed(0)
    task = MultiClassTask(["a", "b", "c"])
    plain = SlideClassifier(backbone=FrozenFeatures(D), head=HEADS[name], task=task).double()
    network = copy.deepcopy(plain)
    _, features = bag(23)
    target = torch.tensor([1])
    expected = plain.task.loss(plain(features), target)
    actual = network.task.loss(TiledModule(network, tiles=(4, 1))(LazyImage.from_tensor(features)), target)
    assert_same_step(plain, network, expected, actual)


def test_some_positions_of_a_map_alone_count_or_are_refused() -> None:
    _, features = bag(8)
    counts = torch.ones(1, 1, 8, 1, dtype=torch.float64)
    counts[:, :, 5:] = 0
    for name in ("mean", "DSMIL"):
        head = built(name)
        torch.testing.assert_close(head(features, counts), head(features[:, :, :5]))
    for name in ("transformer", "TransMIL"):
        with pytest.raises(ValueError, match="is for bags of patches"):
            built(name)(features, counts)


@pytest.mark.parametrize("name", HEADS)
def test_a_bag_of_one_patch(name: str) -> None:
    assert built(name)(bag(1)[1]).isfinite().all()
