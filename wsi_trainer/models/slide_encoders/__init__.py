"""Published slide encoders as heads: architectures, by whose names of parameters published files are loaded."""

from wsi_trainer.models.slide_encoders.gated import Chief, Feather, Madeleine
from wsi_trainer.models.slide_encoders.longnet import GigaPath
from wsi_trainer.models.slide_encoders.perceiver import Prism
from wsi_trainer.models.slide_encoders.titan import Titan

__all__ = ["Chief", "Feather", "GigaPath", "Madeleine", "Prism", "Titan"]
