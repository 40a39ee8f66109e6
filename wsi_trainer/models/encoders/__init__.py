"""Encoders of patches that others have trained and published: what they are, and whether a file of weights is one.

No weights are here and none are fetched: a file is given as `model.pretrained`.
"""

from wsi_trainer.models.encoders.entry import Encoder
from wsi_trainer.models.encoders.registry import ENCODERS, encoder_named

__all__ = ["ENCODERS", "Encoder", "encoder_named"]
