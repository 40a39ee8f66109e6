"""Tasks: what the numbers of the last layer mean, and how wrong they are.

A task brings its loss, its predictions, its scores, and the columns of the manifest that it reads.
"""

from wsi_trainer.models.tasks.base import Cells, Task
from wsi_trainer.models.tasks.classes import BinaryTask, ClassTask, MultiClassTask
from wsi_trainer.models.tasks.hazards import HazardTask
from wsi_trainer.models.tasks.multilabel import MultiLabelTask
from wsi_trainer.models.tasks.ordinal import OrdinalTask
from wsi_trainer.models.tasks.regression import RegressionTask
from wsi_trainer.models.tasks.segmentation import SegmentationTask
from wsi_trainer.models.tasks.survival import CoxTask, SurvivalTask

__all__ = [
    "BinaryTask",
    "Cells",
    "ClassTask",
    "CoxTask",
    "HazardTask",
    "MultiClassTask",
    "MultiLabelTask",
    "OrdinalTask",
    "RegressionTask",
    "SegmentationTask",
    "SurvivalTask",
    "Task",
]
