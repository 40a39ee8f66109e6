"""Slide classifiers: backbones, heads, tasks, and the LightningModule that joins them.

The last is imported when it is used first: Lightning takes seconds, and the processes of a data loader need none of it.
"""

from typing import TYPE_CHECKING, Any

from wsi_trainer.models.backbones import (
    VGG,
    Backbone,
    FrozenFeatures,
    NoSlide,
    ResNet,
    SegmentationBackbone,
    TimmBackbone,
    UNet,
)
from wsi_trainer.models.batch import SlideBatch
from wsi_trainer.models.encoders import PatchEncoder
from wsi_trainer.models.heads import (
    AttentionPooling,
    AveragePooling,
    ClassAttentionPooling,
    DualStreamPooling,
    GeneralisedMeanPooling,
    MaxPooling,
    MeanMLP,
    Pooling,
    TopKPooling,
    TransformerPooling,
    TransMILPooling,
)
from wsi_trainer.models.segmentation import SegmentationTask
from wsi_trainer.models.slide_encoders import Chief, Feather, GigaPath, Madeleine, Prism, Titan
from wsi_trainer.models.targets import MultiTargetTask
from wsi_trainer.models.tasks import (
    BinaryTask,
    ClassTask,
    CoxTask,
    HazardTask,
    MultiClassTask,
    MultiLabelTask,
    OrdinalTask,
    RegressionTask,
    SurvivalTask,
    Task,
)

if TYPE_CHECKING:
    from wsi_trainer.models.slide_model import ModelConfig, SlideClassifier, SlideModel, SlideSegmenter, make_model

__all__ = [
    "VGG",
    "AttentionPooling",
    "AveragePooling",
    "Backbone",
    "BinaryTask",
    "Chief",
    "ClassAttentionPooling",
    "ClassTask",
    "CoxTask",
    "DualStreamPooling",
    "Feather",
    "FrozenFeatures",
    "GeneralisedMeanPooling",
    "GigaPath",
    "HazardTask",
    "Madeleine",
    "MaxPooling",
    "MeanMLP",
    "ModelConfig",
    "MultiClassTask",
    "MultiLabelTask",
    "MultiTargetTask",
    "NoSlide",
    "OrdinalTask",
    "PatchEncoder",
    "Pooling",
    "Prism",
    "RegressionTask",
    "ResNet",
    "SegmentationBackbone",
    "SegmentationTask",
    "SlideBatch",
    "SlideClassifier",
    "SlideModel",
    "SlideSegmenter",
    "SurvivalTask",
    "Task",
    "TimmBackbone",
    "Titan",
    "TopKPooling",
    "TransMILPooling",
    "TransformerPooling",
    "UNet",
    "make_model",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.slide_model"), name)
