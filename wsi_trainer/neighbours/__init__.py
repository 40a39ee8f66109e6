"""Models and results in the programs of others: TRIDENT, STAMP, and the scverse (AnnData, SpatialData).

None of them is needed to import this.
"""

from wsi_trainer.neighbours.encoders import PatchFeatures, SlideFeatures, stamp_encoder
from wsi_trainer.neighbours.predictions import read_stamp

__all__ = ["PatchFeatures", "SlideFeatures", "read_stamp", "stamp_encoder"]
