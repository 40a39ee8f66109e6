"""Slide classifiers: backbones, heads, tasks, and the LightningModule that joins them."""

from wsi_trainer.models.backbones import VGG, Backbone, ConvNeXt, ResNet
from wsi_trainer.models.classifier import SlideBatch, SlideClassifier
from wsi_trainer.models.heads import (
    AttentionPooling,
    AveragePooling,
    GeneralisedMeanPooling,
    MaxPooling,
    Pooling,
    TopKPooling,
)
from wsi_trainer.models.tasks import BinaryTask, MultiClassTask, Task

__all__ = [
    "VGG",
    "AttentionPooling",
    "AveragePooling",
    "Backbone",
    "BinaryTask",
    "ConvNeXt",
    "GeneralisedMeanPooling",
    "MaxPooling",
    "MultiClassTask",
    "Pooling",
    "ResNet",
    "SlideBatch",
    "SlideClassifier",
    "Task",
    "TopKPooling",
]
