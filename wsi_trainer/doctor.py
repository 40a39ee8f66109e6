"""`wsi-train doctor`: versions of what is installed, trials of what must work here, and the command that mends it."""

from __future__ import annotations

import io
import json as json_format
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from importlib import metadata
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from wsi_trainer import __version__
from wsi_trainer.errors import UserError
from wsi_trainer.io.display import cell, say


class Status(StrEnum):
    """Result of a check. `absent` is an extra that is not installed: no fault; `failed` is one."""

    OK = "ok"
    ABSENT = "absent"
    WARNING = "warning"
    FAILED = "failed"


COLOURS = {Status.OK: "green", Status.ABSENT: "dim", Status.WARNING: "yellow", Status.FAILED: "bold red"}


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table."""

    group: str
    """The heading it stands under."""
    name: str
    status: Status
    detail: str = ""
    """A version, a size, or what went wrong."""
    fix: str = ""
    """The command or the step that mends it."""


def attempt(group: str, name: str, trial: Callable[[], str], fix: str = "") -> Check:
    """Run the trial: its text on success; on any error a failed check that carries the error's own words."""
    try:
        return Check(group, name, Status.OK, trial())
    except Exception as error:  # the doctor reports whatever is broken and goes on
        reason = (str(error).splitlines() or [""])[0]
        return Check(group, name, Status.FAILED, f"{type(error).__name__}: {reason}", fix)


def healthy(checks: Iterable[Check]) -> bool:
    """True if all that must work works; an absent extra or a warning does not count against it."""
    return all(check.status is not Status.FAILED for check in checks)


# Packages.

DISTRIBUTION = "wsi-trainer"
REQUIREMENT = re.compile(r"^(?P<name>[\w.-]+)(?:[^;]*;.*extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"])?")


def check_packages() -> list[Check]:
    """Python, each required package, and each optional extra, as the installed distribution declares them."""
    found = [Check("packages", "python", Status.OK, f"{platform.python_version()} on {platform.platform()}")]
    extras: dict[str, list[str]] = {}
    for line in metadata.requires(DISTRIBUTION) or []:
        requirement = REQUIREMENT.match(line)
        if requirement is None or requirement["name"] == DISTRIBUTION:
            continue
        if requirement["extra"] is not None:
            extras.setdefault(requirement["extra"], []).append(requirement["name"])
        elif version := version_of(requirement["name"]):
            found.append(Check("packages", requirement["name"], Status.OK, version))
        else:
            fix = f"pip install {requirement['name']}"
            found.append(Check("packages", requirement["name"], Status.FAILED, "not installed", fix))
    for extra, names in extras.items():
        versions = {name: version_of(name) for name in names}
        listed = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
        absent = not all(versions.values())
        fix = f"pip install '{DISTRIBUTION}[{extra}]'" if absent else ""
        found.append(Check("extras", extra, Status.ABSENT if absent else Status.OK, listed, fix))
    return found


def version_of(name: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# The machine.

GIB = 1024**3
LOW_DISK = 10 * GIB


def check_machine() -> list[Check]:
    """Device, memory, processors and the free disk of the working and the temporary folder."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [
        attempt("machine", "device", device, "pip install 'torch>=2.11,<2.14'"),
        attempt("machine", "memory", memory),
        Check("machine", "cores", Status.OK, f"{cores} usable of {os.cpu_count()}"),
        rates(),
        disk("disk, working folder", Path.cwd()),
        disk("disk, temporary folder", Path(tempfile.gettempdir())),
    ]


def device() -> str:
    """The device that training would use, after one small convolution and its backward on it."""
    import torch

    name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    convolution = torch.nn.Conv2d(3, 4, 3).to(name)
    convolution(torch.ones(1, 3, 8, 8, device=name)).sum().backward()
    if name == "cuda":
        found = torch.cuda.get_device_properties(0)
        return f"cuda: {torch.cuda.device_count()} × {found.name}, {size(found.total_memory)} each"
    return f"{name}: {torch.get_num_threads()} threads, torch {torch.__version__}"


def memory() -> str:
    """The memory of this process: the machine's, or the limit of its container or job if that is smaller."""
    # The default budget is made of the same numbers; the engine is slow to import.
    from lightning_plugin.memory import machine_memory, total_memory

    limit, total = machine_memory(), total_memory()
    if limit < total:
        return f"{size(limit)} (limit of the container or the job; the machine has {size(total)})"
    return size(total)


def rates() -> Check:
    """Speed of the device, by which plans are ranked: as measured, or not measured yet."""
    from lightning_plugin import calibrated

    found = calibrated()
    if found is None:
        detail = "not measured: built-in figures rank the plans"
        return Check("machine", "rates", Status.ABSENT, detail, "wsi-train doctor --calibrate")
    figures = (
        f"{found.flops / 1e9:.0f} GFLOP/s, memory {found.memory / 1e9:.1f} GB/s, host {found.host / 1e9:.1f} GB/s, "
        f"disk {found.disk / 1e9:.2f} GB/s (files in memory {found.file / 1e9:.2f} GB/s), "
        f"{found.call * 1e6:.0f} µs for a call"
    )
    return Check("machine", "rates", Status.OK, figures)


def disk(name: str, folder: Path) -> Check:
    """The free space of a folder: a warning where it is too little for slides."""
    free = shutil.disk_usage(folder).free
    low = free < LOW_DISK
    fix = f"free some space, or work in a folder with more than {size(LOW_DISK)}" if low else ""
    return Check("machine", name, Status.WARNING if low else Status.OK, f"{size(free)} free in {folder}", fix)


def size(count: int) -> str:
    """Bytes as GiB."""
    return f"{count / GIB:.1f} GiB"


# Readers and codecs, each tried on a small image that is smooth, so that a lossy codec changes it little.

SIDE, TILE = 128, 64
RAMP = np.arange(SIDE, dtype=np.uint8)
PIXELS = np.stack([RAMP[:, None] + RAMP, RAMP[:, None] + 0 * RAMP, 0 * RAMP[:, None] + RAMP], axis=-1)
CODECS = {"jpeg": 4, "jpeg2000": 4, "lzw": 0, "zstd": 0}
"""Compressions of TIFF, with the grey levels by which each may change the image on average."""


def check_formats() -> list[Check]:
    """Every reader and every codec."""
    fix = "pip install --force-reinstall {}"
    return [
        attempt("readers", "OpenSlide, tiled TIFF", openslide, fix.format("openslide-python openslide-bin")),
        *(
            attempt("codecs", f"tifffile, {codec}", partial(tiff, codec), fix.format("tifffile imagecodecs"))
            for codec in CODECS
        ),
        attempt("codecs", "zarr v3, sharded zstd + crc32c", zarr_shards, fix.format("zarr numcodecs")),
    ]


def near(read: np.ndarray, tolerance: float = 0) -> str:
    """Describe how the image came back; an error if it is another one."""
    error = float(np.abs(read.astype(int) - PIXELS).mean())
    if error > tolerance:
        raise ValueError(f"pixels differ by {error:.1f} grey levels on average")
    return "identical" if error == 0 else f"within {error:.1f} grey levels on average"


def write_tiff(target: Path | io.BytesIO, codec: str) -> None:
    """A tiled TIFF of the image."""
    import tifffile

    tifffile.imwrite(target, PIXELS, tile=(TILE, TILE), photometric="rgb", compression=codec)


def tiff(codec: str) -> str:
    """Write and read a TIFF with this codec."""
    import tifffile

    write_tiff(file := io.BytesIO(), codec)
    file.seek(0)
    return near(tifffile.imread(file), CODECS[codec])


def openslide() -> str:
    """A tiled JPEG TIFF, read by OpenSlide."""
    import openslide as library

    with tempfile.TemporaryDirectory(prefix="wsi-train-doctor-", ignore_cleanup_errors=True) as folder:
        write_tiff(path := Path(folder) / "tiles.tiff", "jpeg")
        with library.OpenSlide(path) as slide:
            near(np.asarray(slide.read_region((0, 0), 0, (SIDE, SIDE)).convert("RGB")), CODECS["jpeg"])
    return f"OpenSlide {library.__library_version__}"


def zarr_shards() -> str:
    """A sharded zarr v3 array with zstd and checksums, as `wsi-train preprocess` writes it."""
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    sizes = {"shape": PIXELS.shape, "chunks": (TILE, TILE, 3), "shards": (SIDE, SIDE, 3)}
    codecs = [ZstdCodec(level=3), Crc32cCodec()]
    array = zarr.create_array(zarr.storage.MemoryStore(), dtype="uint8", compressors=codecs, **sizes)
    array[:] = PIXELS
    return near(np.asarray(array[:]))


# Published encoders.

LIST_COLUMNS = ("encoder", "patch", "µm/pixel", "vector", "licence", "weights")

SLIDE_COLUMNS = ("slide encoder", "patches of", "patch", "µm/pixel", "vector", "licence", "weights")

LIST_WIDTH = 145
"""Columns that the list takes, also where a terminal has fewer: names of files are not broken."""


def list_encoders() -> None:
    """Print tables of all encoders of patches and of slides that a config may name."""
    from wsi_trainer.models.encoders import ENCODERS  # networks are slow to import
    from wsi_trainer.models.slide_encoders.published import SLIDE_ENCODERS

    console = Console(width=max(Console().width, LIST_WIDTH))
    patches = [(e.name, e.size, f"{e.mpp:g}", e.width, e.licence, e.source) for e in ENCODERS]
    slides = [(e.name, e.encoder, e.size, f"{e.mpp:g}", e.width, e.licence, e.source) for e in SLIDE_ENCODERS]
    for title, columns, rows in (
        ("published encoders", LIST_COLUMNS, patches), ("heads with published weights", SLIDE_COLUMNS, slides)
    ):  # fmt: skip
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in columns:
            table.add_column(column, no_wrap=True)
        for facts in rows:
            table.add_row(*map(cell, facts))
        console.print(table)
    for name, unverified in [(e.name, e.unverified) for e in ENCODERS] + [
        (e.name, e.unverified) for e in SLIDE_ENCODERS
    ]:
        if unverified:
            say(console, (f"not verified of {name}: {unverified}"))


def check_encoder(name: str, weights: Path | None) -> list[Check]:
    """Facts of an encoder of patches or slides, with trials of its network and of a file of weights."""
    from wsi_trainer.models.encoders import Encoder, encoder_named, outline, shapes_of
    from wsi_trainer.models.slide_encoders.published import slide_encoder_named
    from wsi_trainer.models.weights import compare as compare_weights

    of_slides = slide_encoder_named(name)
    encoder = encoder_named(name) if of_slides is None else of_slides
    if isinstance(encoder, Encoder):
        (mean, std), network, architecture = encoder.colours, outline(encoder), encoder.architecture
        said = Check("encoder", "colours", Status.OK, f"mean {mean}, standard deviation {std}")
    else:
        network, architecture = encoder.outline(), encoder.head.__name__
        said = Check("encoder", "encoder of patches", Status.OK, f"{encoder.encoder}, {encoder.channels} numbers")
    found = shapes_of(network)
    same = found == encoder.shapes
    checks = [
        Check("encoder", "patches", Status.OK, f"{encoder.size} × {encoder.size} at {encoder.mpp:g} µm per pixel"),
        said,
        Check("encoder", "vector", Status.OK, f"{encoder.width} numbers"),
        Check("encoder", "licence", Status.OK, f"{encoder.licence}; weights: {encoder.source}"),
        Check(
            "encoder",
            "network",
            Status.OK if same else Status.WARNING,
            f"{architecture}, checksum of shapes {found}",
            "" if same else f"the checksum should be {encoder.shapes}: are timm and transformers of other versions?",
        ),
    ]
    if encoder.unverified:
        checks.append(Check("encoder", "not verified", Status.WARNING, encoder.unverified))
    if weights is not None:
        _, match = compare_weights(network, weights)
        fix = "" if match.fits else f"is it the file of another encoder? that of {name} comes from {encoder.source}"
        checks.append(Check("encoder", "weights", Status.OK if match.fits else Status.FAILED, str(match), fix))
    return checks


# The command.


def doctor(
    json: bool = False,
    calibrate: bool = False,
    encoders: bool = False,
    encoder: str | None = None,
    weights: Path | None = None,
) -> int:
    """Try everything that training needs and say what works, what is missing and how to add it.

    Args:
        json: print the checks as JSON instead of a table
        calibrate: first measure how fast this machine's device is, for some seconds, so that plans fit it
        encoders: only list the published encoders that a config may name, with their licences
        encoder: only look at this published encoder
        weights: with `encoder`, a file of weights: whether it is that encoder's
    """
    if weights is not None and encoder is None:
        raise UserError("--weights is a file of a published encoder: say which by --encoder")
    if encoders:
        list_encoders()
        return 0
    if calibrate:
        import lightning_plugin

        lightning_plugin.calibrate()
    checks = (
        [*check_packages(), *check_machine(), *check_formats()] if encoder is None else check_encoder(encoder, weights)
    )
    if json:
        listed = [asdict(check) for check in checks]
        print(json_format.dumps({"version": __version__, "checks": listed}, indent=2))
    else:
        show(checks, Console())
    return 0 if healthy(checks) else 1


def show(checks: list[Check], console: Console) -> None:
    """The table, one heading for each group, then the commands that mend or add something."""
    table = Table(title=f"wsi-train {__version__}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("", "status", "detail"):
        table.add_column(heading, overflow="fold")
    for group, members in groupby(checks, lambda check: check.group):
        table.add_row(Text(group, style="bold"))
        for check in members:
            status = Text(check.status.value, style=COLOURS[check.status])
            table.add_row(Text(f"  {check.name}"), status, Text(check.detail))
    console.print(table)
    for check in checks:
        if check.fix:
            line = f"{check.name} ({check.status.value}): {check.fix}"
            console.print(Text(line, style=COLOURS[check.status]))
    verdict = "all that must work works" if healthy(checks) else "what must work does not: see above"
    console.print(Text(verdict, style="bold"))
