"""Slides in, a trained and explained slide classifier out.

>>> import wsi_trainer as wt
>>> wt.Slide.open("slide.svs").plot()            # doctest: +SKIP
>>> wt.Run.open("runs/first").predictions()      # doctest: +SKIP

Importing this package imports nothing heavy: a name is imported when it is used first, and torch with the first
prediction.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wsi_trainer.fit.predictor import Predictor
    from wsi_trainer.fit.run import Run
    from wsi_trainer.fit.study import Study
    from wsi_trainer.metrics import read_predictions
    from wsi_trainer.notebook import encoders
    from wsi_trainer.regions.sink import SlideSink
    from wsi_trainer.slide.slide import Slide

__version__ = "1.0.0"
__all__ = ["Predictor", "Run", "Slide", "SlideSink", "Study", "encoders", "read_predictions"]

_WHERE = {
    "Predictor": "fit.predictor",
    "Run": "fit.run",
    "Slide": "slide.slide",
    "SlideSink": "regions.sink",
    "Study": "fit.study",
    "encoders": "notebook",
    "read_predictions": "metrics",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
