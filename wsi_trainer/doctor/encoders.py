"""Published encoders: a list of them, and whether a file of weights is one's."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from wsi_trainer.doctor.check import Check, Status
from wsi_trainer.models.encoders import ENCODERS, encoder_named, outline, shapes_of
from wsi_trainer.models.pretrained import compare
from wsi_trainer.terminal import cell, say

GROUP = "encoder"
COLUMNS = ("encoder", "patch", "µm/pixel", "vector", "licence", "weights")

WIDTH = 130
"""Columns that the list takes, also where a terminal has fewer: names of files are not broken."""


def list_encoders() -> None:
    """Print a table of all encoders that a config may name."""
    console = Console(width=max(Console().width, WIDTH))
    table = Table(title="published encoders", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in COLUMNS:
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
    encoder = encoder_named(name)
    network = outline(encoder)
    mean, std = encoder.colours
    found = shapes_of(network)
    same = found == encoder.shapes
    checks = [
        Check(GROUP, "patches", Status.OK, f"{encoder.size} × {encoder.size} at {encoder.mpp:g} µm per pixel"),
        Check(GROUP, "colours", Status.OK, f"mean {mean}, standard deviation {std}"),
        Check(GROUP, "vector", Status.OK, f"{encoder.width} numbers"),
        Check(GROUP, "licence", Status.OK, f"{encoder.licence}; weights: {encoder.source}"),
        Check(
            GROUP,
            "network",
            Status.OK if same else Status.WARNING,
            f"{encoder.architecture}, checksum of shapes {found}",
            "" if same else f"the checksum should be {encoder.shapes}: another version of {encoder.maker}?",
        ),
    ]
    if encoder.unverified:
        checks.append(Check(GROUP, "not verified", Status.WARNING, encoder.unverified))
    if weights is not None:
        _, match = compare(network, weights)
        fix = "" if match.fits else f"is it the file of another encoder? that of {name} comes from {encoder.source}"
        checks.append(Check(GROUP, "weights", Status.OK if match.fits else Status.FAILED, str(match), fix))
    return checks
