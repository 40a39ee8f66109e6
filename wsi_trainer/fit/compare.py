"""`wsi-train fit --compare`: a run, another on the same slides and splits, and what the first gains and costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from jsonargparse import Namespace
from rich.console import Console
from rich.table import Column, Table

from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import Config
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.study import Study
from wsi_trainer.fit.trainer import at_work
from wsi_trainer.io.display import cell, duration, format_bytes, say
from wsi_trainer.io.files import as_written, read_json, write_json
from wsi_trainer.metrics import Interval
from wsi_trainer.models import AveragePooling, FrozenFeatures, NoSlide

Other = Literal["frozen", "thumbnail", "covariates"]
"""The second run: the same head on features of the encoder as it was, or the same network on slides that were shrunk;
or two more of a run with covariates: the slide alone, and the covariates alone.
"""
SHRUNK = 8
"""How much smaller a thumbnail is than what the run sees, in each direction."""
RUN = "run"
PAUSE = 0.05
"""Seconds between two looks at the memory of the process."""
FOLDERS: dict[str, tuple[str, ...]] = {
    "frozen": (RUN, "frozen"), "thumbnail": (RUN, "thumbnail"), "covariates": (RUN, "slide", "covariates"),
}  # fmt: skip
NAMES: dict[str, tuple[str, ...]] = {
    "frozen": ("end to end", "frozen features"), "thumbnail": ("full resolution", "thumbnail"),
    "covariates": ("slide and covariates", "slide alone", "covariates alone"),
}  # fmt: skip
Fit = Callable[[Config], Any]
"""Trains and tests with a config, in its folder; what is done is kept."""


@dataclass(frozen=True)
class Cost:
    """Time and memory of a piece of work; several pieces of one work add up."""

    seconds: float = 0.0
    processor_seconds: float = 0.0
    process_bytes: int = 0
    """Most resident memory of the process that was seen while it worked."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            self.processor_seconds + other.processor_seconds,
            max(self.process_bytes, other.process_bytes),
        )

    @staticmethod
    def read(path: Path) -> Cost:
        """The cost in a file; nothing where there is none."""
        with as_written(path):
            known = read_json(path)
            return Cost(
                **{name: known[name] for name in ("seconds", "processor_seconds", "process_bytes") if name in known}
            )


@contextmanager
def costing(path: Path) -> Iterator[None]:
    """Adds the work within to the file, also where it fails: a run that is continued costs all of its parts."""
    process, ended, most = psutil.Process(), threading.Event(), [0]

    def look() -> None:
        while not ended.wait(PAUSE):
            most[0] = max(most[0], process.memory_info().rss)

    watch, began = threading.Thread(target=look, name="cost", daemon=True), (time.perf_counter(), time.process_time())
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()
        spent = time.perf_counter() - began[0], time.process_time() - began[1]
        write_json(path, asdict(Cost.read(path) + Cost(*spent, max(most[0], process.memory_info().rss))))


def fit_compared(config: Config, other: Other, fit: Fit, split: str | None, resume: str | None) -> Study:
    """Do all runs in folders of their own, write what they say together, and its report.

    Args:
        config: That of the run.
        other: What it is compared with.
        fit: Does one of them.
        split: What is compared; None compares what all folds hold out.
        resume: Whether to go on with what is there.
    """
    out = config.out
    if out.is_dir() and any(out.iterdir()) and resume is None:
        raise UserError(f"{out} is not empty; choose another --out, or continue with --resume last")
    check(config.keys, other, resume)
    study = Study(out, "comparison", FOLDERS[other], NAMES[other], split)
    first, *others = study.runs.values()
    mine = config.changed(first.path)
    if other == "covariates":
        _check_slides(config, other)
        every = [{"model.covariates": None}, _ALONE]
    elif other == "frozen":
        with costing(features_cost(study)):
            width = _features(config, out)
        keys = {**_UNTRAINED, "data.patches": None, "data.features": out / "features"}
        keys["model.backbone.class_path"] = f"wsi_trainer.models.{FrozenFeatures.__name__}"
        keys["model.backbone.init_args"] = Namespace(width=width)
        every = [keys]
    else:
        _check_slides(config, other)
        data = config.keys.data
        keys = {"data.downsample": SHRUNK * data.downsample}
        keys["data.extra_downsamples"] = tuple(SHRUNK * factor for factor in data.extra_downsamples)
        every = [keys]
    if split is not None:  # what the first run drew, the others take
        every = [{**keys, "data.manifest": first.splits, "data.root": None, "data.splits": None} for keys in every]
    study.write()
    for run, its in (
        (first, mine),
        *((run, config.changed(run.path, keys)) for run, keys in zip(others, every, strict=True)),
    ):
        if split is None or not run.result("test", split).whole:
            with costing(run.cost):
                fit(its)
    facts = _facts(config, study, other)
    write_json(study.results, facts)
    _show(facts)
    from wsi_trainer.report.command import report  # slow to import

    report(out)
    return study


_ALONE: dict[str, Any] = {
    "model.backbone": Namespace(class_path=f"wsi_trainer.models.{NoSlide.__name__}", init_args=Namespace()),
    "model.head": Namespace(class_path=f"wsi_trainer.models.{AveragePooling.__name__}", init_args=Namespace()),
    "model.pretrained": None, "model.finetune": "all", "model.frozen_stages": 0, "model.layer_decay": 1.0,
    "model.head_pretrained": None, "model.finetune_head": "all", "model.magnifications": 1,
    "model.share_backbone": False, "model.pool_over": "slide", "model.batchnorm_over": "slide",
    "data.extra_downsamples": (), "train.budget": None, "train.halo": "auto", "train.split_grid": None,
    "train.compile": "never",
}  # fmt: skip
"""Keys of a run on covariates alone."""
_UNTRAINED: dict[str, Any] = {
    "model.pretrained": None, "model.finetune": "all", "model.frozen_stages": 0, "model.layer_decay": 1.0,
}  # fmt: skip
"""Keys of a run on features: there is no encoder that they could be about."""


def check(options: Namespace, other: Other, resume: str | None) -> None:
    """Refuse what cannot be compared, before anything is done."""
    if resume not in (None, "last"):
        raise UserError(f"--resume is {resume}; a comparison continues with --resume last")
    if options.train.devices > 1:
        raise UserError(
            f"train.devices is {options.train.devices}, and a comparison measures one process; do both runs, and "
            "compare them with `wsi-train report RUN --baseline OTHER`"
        )
    if other == "covariates":
        if not options.model.covariates:
            raise UserError("--compare covariates needs model.covariates, such as --model.covariates='[age, sex]'")
        return
    if other == "thumbnail" and (options.data.patches is not None or options.data.features is not None):
        raise UserError("--compare thumbnail shrinks whole images; with data.patches say --compare frozen")
    if other == "thumbnail":
        return
    if options.data.patches is None:
        raise UserError("--compare frozen needs data.patches and an encoder of patches: frozen features are of patches")
    if options.model.finetune == "none":
        raise UserError("model.finetune is none, which is what --compare frozen compares with; set it to all")
    if options.model.pretrained is None:
        raise UserError(
            "--compare frozen needs model.pretrained: features of an encoder with random weights say nothing"
        )


def features_cost(study: Study) -> Path:
    """The file with the cost of the features of a comparison."""
    return study.path / "features" / "cost.json"


def _check_slides(config: Config, other: Other) -> None:
    model, _, _ = config.build()
    if model.task.dense:
        why = "a thumbnail has others" if other == "thumbnail" else "covariates alone have none"
        raise UserError(f"--compare {other}: {type(model.task).__name__} has a class for each pixel, and {why}")


def _features(config: Config, out: Path) -> int:
    """Write the features of the encoder as it is before it is trained; how many a patch has."""
    from wsi_trainer.embed import write_features  # which has a command of its own

    model, data, settings = config.changed(out, {"model.finetune": "none", "model.frozen_stages": 0}).build()
    with at_work(out):
        write_features(model, data, settings, out / "features")
    return int(model.backbone.out_channels)  # type: ignore[arg-type]


def _facts(config: Config, study: Study, other: Other) -> dict[str, Any]:
    model, _, settings = config.build()
    facts = {
        "compared with": other,
        "runs": list(study.names),
        **study.compare(dict(model.task.scores), settings.resamples, settings.seed),
        "costs": [asdict(Cost.read(run.cost)) | {"step_bytes": step_bytes(run)} for run in study.runs.values()],
        "features": asdict(Cost.read(features_cost(study))) if other == "frozen" else None,
    }
    return facts | {"lines": _lines(facts)}


def step_bytes(folder: Run) -> int:
    """Most that a training step held: as measured in tiles, or what plain PyTorch holds for backward."""
    facts = [read_json(path) for path in (folder.memory, *sorted(folder.path.glob("fold*/memory.json")))]
    return max((one.get("step_peak_bytes", one.get("plain_bytes", 0)) for one in facts), default=0)


def _lines(facts: dict[str, Any]) -> dict[str, str]:
    """The cost of both runs, as rows of a table."""
    kinds: dict[str, Callable[[dict[str, Any]], str]] = {
        "time": lambda cost: duration(cost["seconds"]),
        "processor time": lambda cost: duration(cost["processor_seconds"]),
        "most memory of a step": lambda cost: format_bytes(cost["step_bytes"]),
        "most memory of the process": lambda cost: format_bytes(cost["process_bytes"]),
    }
    lines: dict[str, str] = {}
    for name, said in kinds.items():
        lines |= {f"{name}, {run}": said(cost) for run, cost in zip(facts["runs"], facts["costs"])}
    if facts["features"] is not None:
        made = facts["features"]
        lines["features, before that"] = (
            f"{duration(made['seconds'])}, {duration(made['processor_seconds'])} of a processor, "
            f"{format_bytes(made['process_bytes'])}"
        )
    return lines


def _show(facts: dict[str, Any]) -> None:
    console = Console()
    title = f"{' against '.join(facts['runs'])}, {facts['slides']} slides of {facts['patients']} patients"
    runs = (Column(cell(name)) for name in facts["runs"])
    several = len(facts["runs"]) > 2
    less = [f"less {name}" if several else "difference" for name in facts["runs"][1:]]
    differences = (Column(cell(f"{name}, 95 % interval")) for name in less)
    table = Table("score", *runs, *differences, title=cell(title), title_justify="left")
    for name, found in facts["scores"].items():
        gains = [Interval.of(one) for one in found["differences"]]
        values = (f"{value:z.3f}" for value in found["values"])
        table.add_row(cell(name), *values, *(f"{gain.value:+z.3f} ({gain.bounds})" for gain in gains))
    console.print(table)
    for name, said in facts["lines"].items():
        say(console, f"{name}: {said}")
    if facts["left_out"]:
        say(console, f"left out, since one of the runs could not read them: {', '.join(facts['left_out'])}")
