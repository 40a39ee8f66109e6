"""The one door through which files of others come in: sizes are checked before memory is asked for, nothing is run.

- `files`: any file, if it is a regular one, read whole only up to a limit
- `texts`: text, JSON and YAML
- `xml`: XML, without entities
- `arrays`: NumPy's arrays, zarr with known codecs, HDF5
- `pictures`: PNG and JPEG

Slides themselves are opened by the readers of `wsi_trainer.slide.formats`, weights by `wsi_trainer.models.weights`,
tables by `wsi_trainer.io.tables`.
"""

from .files import TEXT, Limit, Unreadable, open_file, read_bytes
from .texts import json_of, read_json, read_text, read_yaml, yaml_of

__all__ = [
    "TEXT", "Limit", "Unreadable", "json_of", "open_file", "read_bytes", "read_json", "read_text", "read_yaml",
    "yaml_of",
]  # fmt: skip
