"""What a run has left, file by file, judged without the project's own checks.

Bytes are compared as hashes. Where a file holds times, or an archive holds them, what is left of it without them is
compared; every rule of `RULES` is one way to leave them out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

Digest = Callable[[Path], str]
#: Keys of JSON whose values are times, or depend on the machine.
TIMES = re.compile(r"second|time|peak|bytes|memory|energy|watt|joule|cost|date|when|created|python|host", re.IGNORECASE)
#: What no run may leave behind.
TEMPORARY = re.compile(r"\.(part|partial|tmp|due|aside)$|^tmp|~$|\.staging/.*(?<!\.lock)$", re.IGNORECASE)
ANY = "any"


def hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def exact(path: Path) -> str:
    return hashed(path.read_bytes())


def without_times(path: Path) -> str:
    """JSON without keys that tell of times."""

    def stripped(thing: Any) -> Any:
        if isinstance(thing, dict):
            return {key: stripped(value) for key, value in thing.items() if not TIMES.search(str(key))}
        return [stripped(one) for one in thing] if isinstance(thing, list) else thing

    return hashed(json.dumps(stripped(json.loads(path.read_text())), sort_keys=True).encode())


def tensors(path: Path) -> str:
    """The weights and the optimizer's state of a checkpoint, which a zip holds as files without names of their own."""
    import torch

    loaded = torch.load(path, weights_only=True)
    parts = []

    def walk(thing: Any, name: str) -> None:
        if isinstance(thing, torch.Tensor):
            parts.append(f"{name}{tuple(thing.shape)}{thing.dtype}{hashed(thing.contiguous().numpy().tobytes())}")
        elif isinstance(thing, dict):
            for key in sorted(thing, key=str):
                walk(thing[key], f"{name}.{key}")
        elif isinstance(thing, list | tuple):
            for number, one in enumerate(thing):
                walk(one, f"{name}.{number}")

    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        walk(loaded.get(key, loaded if key == "state_dict" else None), key)
    return hashed("\n".join(parts).encode())


def anything(path: Path) -> str:
    """A file that tells of times all over; it has only to be there."""
    return ANY


def lines_of_json(path: Path) -> str:
    """A log: each line can be read."""
    for line in path.read_text().splitlines():
        json.loads(line)
    return ANY


def page(path: Path) -> str:
    """A page without times, and its drawings without the numbers that matplotlib draws for names."""
    text = re.sub(
        r"(?<=data:image/svg\+xml;base64,)[\w+/=]+",
        lambda found: re.sub(r"<dc:date>[^<]*|\b\w*[0-9a-f]{10}\b", "", base64.b64decode(found[0]).decode()),
        path.read_text(),
    )
    text = re.sub(
        r"\d+(\.\d+)? ?(s|ms|min|h|KiB|MiB|GiB|bytes)\b|\d\d \w+ \d{4}, \d\d:\d\d|\d{4}-\d\d-\d\d[T ]?[\d:.]*", "", text
    )
    return hashed(text.encode())


def without_version(path: Path) -> str:
    """The contents of the viewer without the number that tells a browser of another copy."""
    return hashed(re.sub(r'"version":\s*"\w+"', "", path.read_text()).encode())


def archive(path: Path) -> str:
    """The files of a zip."""
    with zipfile.ZipFile(path) as file:
        return hashed("".join(f"{info.filename}{info.CRC}" for info in file.infolist()).encode())


#: By the name of a file within the run's folder; the first that fits.
RULES: tuple[tuple[str, Digest], ...] = (
    ("*/events.jsonl", lines_of_json),
    ("*/log.txt", anything),
    ("*/tensorboard/*", anything),
    ("*/metrics/*", anything),
    ("cache/*", anything),
    ("home/*", anything),
    ("*/checkpoints/*.ckpt", tensors),
    ("*/report.html", page),
    ("*/contents.js", without_version),
    ("*/environment.json", without_times),
    ("*/memory.json", without_times),
    ("*/cost.json", without_times),
    ("*/estimate.json", without_times),
    ("*/heatmaps.json", without_times),
    ("*.lock", anything),
)
#: Of these there may be more or fewer after a rerun.
FREE = ("*/tensorboard/*", "*/metrics/version_*", "cache/*", "home/*", "*.lock")


def tree(now: Path) -> dict[str, str]:
    """Each file with what is compared of it; a file that its rule cannot read is broken."""
    found = {}
    for path in sorted(now.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        name = path.relative_to(now).as_posix()
        rule = next((digest for pattern, digest in RULES if fnmatch(name, pattern)), exact)
        try:
            found[name] = rule(path)
        except Exception as error:
            found[name] = f"broken: {type(error).__name__}"
    return found


def difference(expected: Mapping[str, str], actual: Mapping[str, str], free: tuple[str, ...] = ()) -> str:
    """What is not as it is to be, or nothing."""
    for name, digest in expected.items():
        if name not in actual:
            if not any(fnmatch(name, pattern) for pattern in (*FREE, *free)):
                return f"{name} is missing"
        elif actual[name] != digest and not any(fnmatch(name, pattern) for pattern in free):
            return f"{name} is another ({actual[name]})"
    for name in actual.keys() - expected.keys():
        if any(fnmatch(name, pattern) for pattern in free):
            continue
        if name.startswith("tmp/") or TEMPORARY.search(name):
            return f"{name} is left over"
        if not any(fnmatch(name, pattern) for pattern in (*FREE, *free)):
            return f"{name} is there"
    return ""
