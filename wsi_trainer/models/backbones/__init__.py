"""Backbones: from a slide to a map of features. Plain convolutional networks that know nothing of tiles."""

from wsi_trainer.models.backbones.base import Backbone, stages_of
from wsi_trainer.models.backbones.convnext import ConvNeXt
from wsi_trainer.models.backbones.darknet import DarkNet
from wsi_trainer.models.backbones.efficientnet import EfficientNet
from wsi_trainer.models.backbones.features import FrozenFeatures
from wsi_trainer.models.backbones.fpn import FPN
from wsi_trainer.models.backbones.named import make_backbone
from wsi_trainer.models.backbones.patches import PatchEncoder
from wsi_trainer.models.backbones.resnet import ResNet
from wsi_trainer.models.backbones.timm import TimmBackbone
from wsi_trainer.models.backbones.unet import UNet, UNetEncoder
from wsi_trainer.models.backbones.vgg import VGG

__all__ = [
    "FPN",
    "VGG",
    "Backbone",
    "ConvNeXt",
    "DarkNet",
    "EfficientNet",
    "FrozenFeatures",
    "PatchEncoder",
    "ResNet",
    "TimmBackbone",
    "UNet",
    "UNetEncoder",
    "make_backbone",
    "stages_of",
]
