"""`wsi-train doctor`: versions of what is installed, trials of what must work here, and the command that mends it."""

from __future__ import annotations

import json as json_format
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from wsi_trainer import __version__
from wsi_trainer.errors import UserError
from wsi_trainer.io.display import cell, say


class Status(StrEnum):
    """How a check ended. `absent` is an extra that is not installed: no fault; `failed` is one."""

    OK = "ok"
    ABSENT = "absent"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table.

    Args:
        group: the heading it stands under
        name: what was tried
        status: how it ended
        detail: a version, a size, or what went wrong
        fix: the command or the step that mends it, if there is something to mend
    """

    group: str
    name: str
    status: Status
    detail: str = ""
    fix: str = ""


def attempt(group: str, name: str, trial: Callable[[], str], fix: str = "") -> Check:
    """Run the trial: its text on success; on any error a failed check that carries the error's own words."""
    try:
        return Check(group, name, Status.OK, trial())
    except Exception as error:  # the doctor reports whatever is broken and goes on
        return Check(group, name, Status.FAILED, f"{type(error).__name__}: {first_line(error)}", fix)


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [""])[0]


def healthy(checks: Iterable[Check]) -> bool:
    """Whether all that must work works; an absent extra or a warning does not count against it."""
    return all(check.status is not Status.FAILED for check in checks)


DISTRIBUTION = "wsi-trainer"
REQUIREMENT = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?(?P<versions>[^;]*)(?:;.*extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"])?"
)


def check_packages() -> list[Check]:
    """A check for Python, one for each required package, and one for each optional extra."""
    required, extras = declared()
    python = Check("packages", "python", Status.OK, f"{platform.python_version()} on {platform.platform()}")
    needed = [check_required(name) for name in required]
    optional = [check_extra(extra, names) for extra, names in extras.items()]
    return [python, *needed, *optional]


def declared() -> tuple[list[str], dict[str, list[str]]]:
    """The required packages and those of each extra, as the installed distribution declares them."""
    required: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in metadata.requires(DISTRIBUTION) or []:
        found = REQUIREMENT.match(line)
        if found is None or found["name"] == DISTRIBUTION:
            continue
        if found["extra"] is None:
            required.append(found["name"])
        else:
            extras.setdefault(found["extra"], []).append(found["name"])
    return required, extras


def version_of(name: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_required(name: str) -> Check:
    """A package that the application cannot do without."""
    version = version_of(name)
    if version is None:
        return Check("packages", name, Status.FAILED, "not installed", f"pip install {name}")
    return Check("packages", name, Status.OK, version)


def check_extra(extra: str, names: list[str]) -> Check:
    """An optional extra: all of its packages, or what is missing and the command that adds it."""
    versions = {name: version_of(name) for name in names}
    listed = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
    if all(versions.values()):
        return Check("extras", extra, Status.OK, listed)
    return Check("extras", extra, Status.ABSENT, listed, f"pip install '{DISTRIBUTION}[{extra}]'")


GIB = 1024**3
LOW_DISK = 10 * GIB


def check_machine(folder: Path) -> list[Check]:
    """Device, memory, cores and the free disk of the working and the temporary folder."""
    return [
        attempt("machine", "device", device, "pip install 'torch>=2.11,<2.14'"),
        attempt("machine", "memory", memory),
        Check("machine", "cores", Status.OK, f"{usable_cores()} usable of {os.cpu_count()}"),
        rates(),
        disk("disk, working folder", folder),
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


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rates() -> Check:
    """How fast the device is, by which plans are ranked: as measured, or not measured yet."""
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
    if free < LOW_DISK:
        fix = f"free some space, or work in a folder with more than {size(LOW_DISK)}"
        return Check("machine", name, Status.WARNING, f"{size(free)} free in {folder}", fix)
    return Check("machine", name, Status.OK, f"{size(free)} free in {folder}")


def size(count: int) -> str:
    """Bytes as GiB."""
    return f"{count / GIB:.1f} GiB"


READERS = "readers"
CODECS = "codecs"
TILE = 64
SIDE = 2 * TILE
# JPEG and JPEG 2000 are lossy; on this smooth image they stay well within this many grey levels on average.
LOSSY_TOLERANCE = 4.0
TIFF_CODECS = {"jpeg": LOSSY_TOLERANCE, "jpeg2000": LOSSY_TOLERANCE, "lzw": 0.0, "zstd": 0.0}


def check_formats(folder: Path) -> list[Check]:
    """Try every reader and every codec in this folder."""
    fix = "pip install --force-reinstall {}"
    slides = fix.format("openslide-python openslide-bin")
    checks = [
        attempt(READERS, "OpenSlide, pyramidal TIFF", lambda: openslide_tiff(folder), slides),
    ]
    for codec, tolerance in TIFF_CODECS.items():
        trial = tiff_trial(folder, codec, tolerance)
        checks.append(attempt(CODECS, f"tifffile, {codec}", trial, fix.format("tifffile imagecodecs")))
    store = fix.format("zarr numcodecs")
    checks.append(attempt(CODECS, "zarr v3, sharded zstd + crc32c", lambda: zarr_shards(folder), store))
    return checks


def picture() -> np.ndarray:
    """A smooth colour image, so that a lossy codec changes it little."""
    ramp = np.linspace(40, 220, SIDE, dtype=np.float64)
    planes = [np.add.outer(ramp, 0 * ramp), np.add.outer(0 * ramp, ramp), np.add.outer(ramp, ramp) / 2]
    return np.stack(planes, axis=-1).astype(np.uint8)


def compare(read: np.ndarray, tolerance: float = 0.0) -> float:
    """The mean difference from the picture, or an error if it is more than the tolerance."""
    expected = picture()
    if read.shape != expected.shape:
        raise ValueError(f"read back as {read.shape}, written as {expected.shape}")
    error = float(np.abs(read.astype(int) - expected.astype(int)).mean())
    if error > tolerance:
        raise ValueError(f"pixels differ by {error:.1f} grey levels on average")
    return error


def write_tiff(path: Path, compression: str, levels: int = 1) -> None:
    """A tiled TIFF with a resolution of 0.5 µm per pixel and `levels` pyramid levels."""
    import tifffile

    options: dict[str, Any] = {
        "tile": (TILE, TILE),
        "photometric": "rgb",
        "compression": compression,
        "resolutionunit": "CENTIMETER",
    }
    with tifffile.TiffWriter(path) as writer:
        for level in range(levels):
            step = 2**level
            writer.write(
                np.ascontiguousarray(picture()[::step, ::step]),
                subfiletype=int(level > 0),
                resolution=(20000 / step, 20000 / step),
                **options,
            )


def openslide_tiff(folder: Path) -> str:
    """A pyramidal tiled JPEG TIFF, opened by OpenSlide."""
    import openslide

    path = folder / "pyramid.tiff"
    write_tiff(path, "jpeg", levels=2)
    with openslide.OpenSlide(path) as slide:
        if slide.level_count != 2:
            raise ValueError(f"{slide.level_count} levels read, 2 written")
        region = np.asarray(slide.read_region((0, 0), 0, (SIDE, SIDE)).convert("RGB"))
    compare(region, LOSSY_TOLERANCE)
    return f"OpenSlide {openslide.__library_version__}"


def tiff_trial(folder: Path, codec: str, tolerance: float) -> Callable[[], str]:
    """Write and read a tiled TIFF with this codec."""

    def trial() -> str:
        import tifffile

        path = folder / f"{codec}.tiff"
        write_tiff(path, codec)
        return described(compare(tifffile.imread(path), tolerance))

    return trial


def zarr_shards(folder: Path) -> str:
    """A sharded zarr v3 array with zstd and checksums, as `wsi-train preprocess` writes it."""
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    image = np.moveaxis(picture(), -1, 0)
    path = folder / "shards.zarr"
    array = zarr.create_array(
        str(path),
        shape=image.shape,
        dtype="uint8",
        chunks=(3, TILE, TILE),
        shards=(3, SIDE, SIDE),
        compressors=[ZstdCodec(level=3), Crc32cCodec()],
        fill_value=255,
    )
    array[:] = image
    read = np.asarray(zarr.open_array(str(path), mode="r")[:])
    return described(compare(np.moveaxis(read, 0, -1)))


def described(error: float) -> str:
    """How near the image came back."""
    return "identical" if error == 0 else f"within {error:.1f} grey levels on average"


LIST_COLUMNS = ("encoder", "patch", "µm/pixel", "vector", "licence", "weights")

LIST_WIDTH = 130
"""Columns that the list takes, also where a terminal has fewer: names of files are not broken."""


def list_encoders() -> None:
    """Print a table of all encoders that a config may name."""
    from wsi_trainer.models.encoders import ENCODERS  # networks are slow to import

    console = Console(width=max(Console().width, LIST_WIDTH))
    table = Table(title="published encoders", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in LIST_COLUMNS:
        table.add_column(column, no_wrap=True)
    for encoder in ENCODERS:
        facts = (encoder.name, encoder.size, f"{encoder.mpp:g}", encoder.width)
        table.add_row(*map(cell, (*facts, encoder.licence, encoder.source)))
    console.print(table)
    for encoder in ENCODERS:
        if encoder.unverified:
            say(console, (f"not verified of {encoder.name}: {encoder.unverified}"))


def check_encoder(name: str, weights: Path | None) -> list[Check]:
    """What is known of an encoder, whether its network is the one that is meant, and whether a file fits it."""
    from wsi_trainer.models.encoders import encoder_named, outline, shapes_of
    from wsi_trainer.models.pretrained import compare as compare_weights

    encoder = encoder_named(name)
    network = outline(encoder)
    mean, std = encoder.colours
    found = shapes_of(network)
    same = found == encoder.shapes
    checks = [
        Check("encoder", "patches", Status.OK, f"{encoder.size} × {encoder.size} at {encoder.mpp:g} µm per pixel"),
        Check("encoder", "colours", Status.OK, f"mean {mean}, standard deviation {std}"),
        Check("encoder", "vector", Status.OK, f"{encoder.width} numbers"),
        Check("encoder", "licence", Status.OK, f"{encoder.licence}; weights: {encoder.source}"),
        Check(
            "encoder",
            "network",
            Status.OK if same else Status.WARNING,
            f"{encoder.architecture}, checksum of shapes {found}",
            "" if same else f"the checksum should be {encoder.shapes}: another version of {encoder.maker}?",
        ),
    ]
    if encoder.unverified:
        checks.append(Check("encoder", "not verified", Status.WARNING, encoder.unverified))
    if weights is not None:
        _, match = compare_weights(network, weights)
        fix = "" if match.fits else f"is it the file of another encoder? that of {name} comes from {encoder.source}"
        checks.append(Check("encoder", "weights", Status.OK if match.fits else Status.FAILED, str(match), fix))
    return checks


COLOURS = {Status.OK: "green", Status.ABSENT: "dim", Status.WARNING: "yellow", Status.FAILED: "bold red"}


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
    if encoders or encoder is not None:
        return _encoders(encoder, weights, json)
    if calibrate:
        import lightning_plugin

        lightning_plugin.calibrate()
    return _told(examine(), json)


def _encoders(name: str | None, weights: Path | None, json: bool) -> int:
    if name is not None:
        return _told(check_encoder(name, weights), json)
    list_encoders()
    return 0


def _told(checks: list[Check], json: bool) -> int:
    """Show the checks; the exit code says whether all is well."""
    if json:
        listed = [asdict(check) for check in checks]
        print(json_format.dumps({"version": __version__, "checks": listed}, indent=2))
    else:
        show(checks, Console())
    return 0 if healthy(checks) else 1


def examine() -> list[Check]:
    """All checks; the files that they make are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="wsi-train-doctor-", ignore_cleanup_errors=True) as folder:
        formats = check_formats(Path(folder))
    return [*check_packages(), *check_machine(Path.cwd()), *formats]


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
