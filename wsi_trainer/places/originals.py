"""The original files of slides that were converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from wsi_trainer.errors import UserError
from wsi_trainer.slide.formats.store import is_own_store
from wsi_trainer.slides.inputs import list_slides
from wsi_trainer.store.identity import quick_hash
from wsi_trainer.store.manifest import read_manifest


@dataclass(frozen=True)
class Originals:
    """Slides by what identifies their content, so that they are found under any name."""

    files: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def in_folder(cls, folder: Path | None) -> Originals:
        """All slides of a folder and the folders in it; none without one."""
        if folder is None:
            return cls()
        if not folder.is_dir():
            raise UserError(f"--originals {folder}: there is no such folder")
        found = [item.job.slide for item in list_slides(str(folder))]
        return cls({quick_hash(path): path for path in found})

    def of(self, path: Path) -> Path | None:
        """The original of a slide: itself, or for a store the slide it was made from, where that is known."""
        if not is_own_store(path):
            return path
        try:
            return self.files.get(read_manifest(path)["settings"]["header"]["source"])
        except (OSError, ValueError, KeyError, TypeError):  # a store that lost its manifest is read all the same
            return None
