"""What a slide's features were made of, beside the encoder: its pixels, which patches of them, in which precision.

A file of features keeps it, so that one that is there already is known to be what a command would make, or not.
"""

from __future__ import annotations

import hashlib
import json

from wsi_trainer.data import PatchConfig, SlideRecord
from wsi_trainer.data.patches.given import chosen_patches
from wsi_trainer.slide.errors import SlideError
from wsi_trainer.slide.formats.store import is_own_store
from wsi_trainer.store.identity import quick_hash
from wsi_trainer.store.manifest import read_manifest


def origin_of(record: SlideRecord, patches: PatchConfig, half: bool) -> str:
    """A checksum of all that decides about the features of a slide by one encoder.

    Args:
        record: The slide.
        patches: Which patches.
        half: Whether the encoder works in bfloat16.
    """
    about = {
        "pixels": _pixels(record), "source_mpp": record.mpp, "size": patches.size, "mpp": patches.resolution,
        "half": half, "places": _places(record, patches),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _pixels(record: SlideRecord) -> str:
    """A store's by the hashes in its manifest, any other slide's by parts of its files."""
    if not is_own_store(record.path):
        return quick_hash(record.path)
    try:
        files = read_manifest(record.path)["files"]
    except ValueError as error:
        raise SlideError(record.path, str(error)) from error
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _places(record: SlideRecord, patches: PatchConfig) -> list[object]:
    if patches.positions is not None:
        chosen = chosen_patches(patches.positions, record.path)
        return ["given", hashlib.sha256(chosen.points.tobytes()).hexdigest(), chosen.middle]
    return [patches.over, patches.step, patches.min_tissue if patches.over == "tissue" else None]
