"""Covariates in networks: tile by tile what plain PyTorch computes, and one layer on vector and covariates together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_plugin import LazyImage, TensorSource, TiledModule
from wsi_trainer.data.covariates import Covariate, Covariates
from wsi_trainer.fit.predictor import Answer
from wsi_trainer.models import (
    VGG,
    BinaryTask,
    ClassAttentionPooling,
    MultiClassTask,
    SegmentationTask,
    SlideBatch,
    SlideClassifier,
    SlideModel,
    SlideSegmenter,
    UNet,
)

AGE = {"age": {"mean": 60.0, "std": 10.0}, "sex": {"categories": ["f", "m"]}}
BESIDE = torch.tensor([[0.7, 0.0, 0.0, 1.0, 0.0]]).double()


def classifier() -> SlideModel:
    return SlideClassifier(
        backbone=VGG((4, 8)), head=ClassAttentionPooling, task=MultiClassTask(["a", "b", "c"]), covariates=AGE
    )


def segmenter() -> SlideModel:
    targets = {"pixels": SegmentationTask(["normal", "tumour"]), "label": BinaryTask()}
    return SlideSegmenter(backbone=UNet((4, 8)), targets=targets, covariates=AGE)


def batch_of(image: Tensor, model: SlideModel) -> SlideBatch:
    truth = {"label": torch.tensor([1])} if isinstance(model, SlideClassifier) else {}
    return {"image": image, "targets": truth, "slide": "a", "covariates": BESIDE}


@pytest.mark.slow
@pytest.mark.parametrize("build", [classifier, segmenter])
def test_tile_by_tile_is_plain_pytorch(build: type) -> None:
    torch.manual_seed(0)
    model = build().double().eval()
    nn.init.normal_(model.covariate_classifier.weight)
    image = torch.randint(0, 255, (1, 3, 200, 168), dtype=torch.uint8)
    tiled = TiledModule(Answer(copy.deepcopy(model)), budget="512KiB")
    found = tiled(batch_of(LazyImage(TensorSource(image)), model))
    plain = Answer(model)(batch_of(image, model))
    assert len(tiled.plan.segments) > 0 and torch.allclose(found, plain, rtol=1e-9, atol=1e-12)
    other = Answer(model)({**batch_of(image, model), "covariates": 2 * BESIDE})
    assert not torch.allclose(plain, other)
    with pytest.raises(ValueError, match=r"takes 5 numbers of model\.covariates beside a slide, and not 0"):
        Answer(model)({key: value for key, value in batch_of(image, model).items() if key != "covariates"})


def test_each_branch_has_the_covariates_beside_its_vector() -> None:
    model = classifier().double().eval()
    assert isinstance(model, SlideClassifier)
    nn.init.normal_(model.covariate_classifier.weight)
    vector = torch.randn(1, model.head.out_channels).double()
    rows = zip(vector.unflatten(1, (3, -1))[0], model.classifier.weight, model.covariate_classifier.weight)
    expected = [torch.cat([own, BESIDE[0]]) @ torch.cat([weight, beside]) for own, weight, beside in rows]
    assert torch.allclose(model.forward_head(vector, BESIDE)[0], torch.stack(expected) + model.classifier.bias)


def test_the_slide_begins_as_without_covariates() -> None:
    networks = []
    for covariates in (None, AGE):
        torch.manual_seed(5)
        networks.append(SlideClassifier(backbone=VGG((4,)), covariates=covariates))
    without, with_them = (model.state_dict() for model in networks)
    assert set(with_them) - set(without) == {"covariate_classifier.weight"}
    assert all(torch.equal(with_them[name], value) for name, value in without.items())
    assert not networks[1].covariate_classifier.weight.any()


def test_numbers_categories_and_what_is_missing() -> None:
    covariates = Covariates.of(AGE)
    rows = [[*(x for one, cell in zip(covariates.columns, cells) for x in one.numbers(cell, "s"))] for cells in (
        ("70", "m"), ("NA", ""), ("60", "none"),
    )]  # fmt: skip
    assert rows == [[1, 0, 0, 1, 0], [0, 1, 0, 0, 1], [0, 0, 0, 0, 1]]
    stage = Covariate("stage").fit(["none", "ii", "none", "ii", "ii", ""], list("abcdef"))
    assert stage.kind == "category" and stage.categories == ("ii", "none"), "a category may be called none"
    assert Covariate("grade").fit(["1", "2", "None", "2"], list("abcd")).kind == "number"
    with pytest.raises(Exception, match="the column 'x' is empty in all training slides"):
        Covariate("x").fit(["", "nan"], ["a", "b"])
    assert Covariates.of(covariates.said) == covariates
