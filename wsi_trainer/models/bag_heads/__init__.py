"""Heads of papers on bags of patches: each position of the map is one patch."""

from wsi_trainer.models.bag_heads.dsmil import DualStreamPooling
from wsi_trainer.models.bag_heads.mean import MeanMLP
from wsi_trainer.models.bag_heads.transformer import TransformerPooling
from wsi_trainer.models.bag_heads.transmil import TransMILPooling

__all__ = ["DualStreamPooling", "MeanMLP", "TransMILPooling", "TransformerPooling"]
