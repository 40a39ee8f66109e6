"""Opening the image of a slide as a source, at full resolution or shrunk."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Image


def readers_of(given: int | None = None) -> int:
    """How many threads read and decode a slide: as many as were given, or by what computes.

    A processor decodes some 300 megapixels a second and computes a network on less than one, so two threads never wait
    long and take little from it. A GPU computes as fast as several processors decode; one is left for what feeds it.
    """
    if given is not None:
        return given
    return max(2, min(8, processors() - 1)) if torch.cuda.is_available() else 2


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_image(path: Path, downsample: int = 1, source_mpp: float | None = None, readers: int = 2) -> Image:
    """The image of a slide or of a store, shrunk by `downsample` in each direction.

    Args:
        path: The slide or the store.
        downsample: How much it is shrunk.
        source_mpp: Micrometres per pixel of a slide, where its file does not say it or says it wrong. A store says
            what preprocess settled.
        readers: How many threads read it.
    """
    return Image(Slide.open(path, mpp=source_mpp), factor=downsample, threads=readers)


def dense(source: TileSource) -> Tensor:
    """All pixels of a source. It holds the whole image: for slides that fit."""
    lead = source.instances or 0
    return source.read(Box.whole((*source.shape[:lead], *source.shape[max(lead, 1) + 1 :])))
