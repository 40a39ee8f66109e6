"""Slide classifiers: backbones, heads, tasks, and the LightningModule that joins them."""

from wsi_trainer.models.backbones import VGG, Backbone, FrozenFeatures, ResNet, SegmentationBackbone, TimmBackbone, UNet
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
from wsi_trainer.models.slide_model import (
    ModelConfig,
    SlideBatch,
    SlideClassifier,
    SlideModel,
    SlideSegmenter,
    make_model,
)
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

__all__ = [
    "VGG",
    "AttentionPooling",
    "AveragePooling",
    "Backbone",
    "BinaryTask",
    "ClassAttentionPooling",
    "ClassTask",
    "CoxTask",
    "DualStreamPooling",
    "FrozenFeatures",
    "GeneralisedMeanPooling",
    "HazardTask",
    "MaxPooling",
    "MeanMLP",
    "ModelConfig",
    "MultiClassTask",
    "MultiLabelTask",
    "MultiTargetTask",
    "OrdinalTask",
    "PatchEncoder",
    "Pooling",
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
    "TopKPooling",
    "TransMILPooling",
    "TransformerPooling",
    "UNet",
    "make_model",
]
