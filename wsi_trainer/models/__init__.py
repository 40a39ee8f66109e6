"""Slide classifiers: backbones, heads, tasks, and the LightningModule that joins them."""

from wsi_trainer.models.backbones import (
    VGG,
    Backbone,
    ConvNeXt,
    DarkNet,
    EfficientNet,
    ResNet,
    TimmBackbone,
    UNet,
    UNetEncoder,
)
from wsi_trainer.models.batch import SlideBatch
from wsi_trainer.models.classifier import SlideClassifier
from wsi_trainer.models.heads import (
    AttentionPooling,
    AveragePooling,
    ClassAttentionPooling,
    GeneralisedMeanPooling,
    MaxPooling,
    Pooling,
    TopKPooling,
)
from wsi_trainer.models.tasks import (
    BinaryTask,
    ClassTask,
    CoxTask,
    HazardTask,
    MultiClassTask,
    MultiLabelTask,
    OrdinalTask,
    RegressionTask,
    SegmentationTask,
    SurvivalTask,
    Task,
)

__all__ = [
    "VGG",
    "AttentionPooling",
    "AveragePooling",
    "Backbone",
    "BinaryTask",
    "ClassAttentionPooling",
    "ClassTask",
    "ConvNeXt",
    "CoxTask",
    "DarkNet",
    "EfficientNet",
    "GeneralisedMeanPooling",
    "HazardTask",
    "MaxPooling",
    "MultiClassTask",
    "MultiLabelTask",
    "OrdinalTask",
    "Pooling",
    "RegressionTask",
    "ResNet",
    "SegmentationTask",
    "SlideBatch",
    "SlideClassifier",
    "SurvivalTask",
    "Task",
    "TimmBackbone",
    "TopKPooling",
    "UNet",
    "UNetEncoder",
]
