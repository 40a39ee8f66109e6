"""Maps and regions as DICOM, beside the slides that they are of (extra `dicom`)."""

from .write import need_highdicom, results_as_dicom

__all__ = ["need_highdicom", "results_as_dicom"]
