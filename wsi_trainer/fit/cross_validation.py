"""`wsi-train fit --folds N`: an ordinary run for each fold, and what they say together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from wsi_trainer.data.datamodule import stratified
from wsi_trainer.data.dataset import DataConfig, targets_of
from wsi_trainer.data.splits import folds, read_splits, write_folds
from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import Config
from wsi_trainer.fit.fit import run_fit
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.study import Study
from wsi_trainer.io.display import cell
from wsi_trainer.io.files import write_text
from wsi_trainer.metrics import Interval
from wsi_trainer.models import Task


def fit_folds(config: Config, count: int, by: Literal["patient", "site"], resume: str | None) -> Study:
    """Train on each fold in turn, each in a folder of its own, and write cross_validation.json.

    With `resume` folds that are done are kept, and the one under way goes on.
    """
    out = Run(config.out)
    if out.path.is_dir() and any(out.path.iterdir()) and resume is None:
        raise UserError(f"{out.path} is not empty; choose another --out, or continue with --resume last")
    if resume not in (None, "last"):
        raise UserError(f"--resume is {resume}; a cross-validation continues with --resume last")
    model, data, settings = config.build()
    if data.splits is not None:
        raise UserError("--folds divides the slides anew, and data.splits says how: leave one of them out")
    manifests = divide(model.task, data, count, settings.seed, by, out.path)
    split = held_out(manifests)
    write_text(out.config, config.text)
    names = tuple(manifest.stem for manifest in manifests)
    study = Study(out.path, "folds", names, names, split)
    study.write()
    console = Console()
    for fold, manifest in zip(study.runs.values(), manifests, strict=True):
        console.rule(f"{fold.name} of {count}", align="left")
        if not fold.result("test", split).whole:
            mine = config.changed(fold.path, {"data.manifest": manifest, "data.root": None, "data.stores": None})
            if settings.devices > 1:  # a process forms one group with others, and not one for each fold
                write_text(manifest.with_suffix(".yaml"), mine.text)
                raise UserError(
                    f"train.devices is {settings.devices}, and --folds trains one fold after the other in one process, "
                    f"on one device. Train {fold.name} by `wsi-train fit --config {manifest.with_suffix('.yaml')} "
                    f"--out {fold.path} --test-on {split}`, and go on by this command with --resume last"
                )
            run_fit(mine, resume, split=split)
    show(study.cross_validate(dict(model.task.scores), settings.resamples, settings.seed, by), console)
    return study


def divide(
    task: Task, data: DataConfig, count: int, seed: int, by: Literal["patient", "site"], out: Path
) -> list[Path]:
    """Write a manifest with splits for each fold, by the strata of the task. Folds that are there are kept."""
    there = sorted((out / "folds").glob("fold*.csv"), key=lambda path: (len(path.stem), path.stem))
    if there:
        if len(there) != count:
            raise UserError(f"{out} has {len(there)} folds and --folds is {count}; a cross-validation keeps its folds")
        return there
    records = data.records(columns=task.columns, filled=not task.may_be_empty)
    for record in records:
        targets_of(task, record)
    divided = folds(stratified(task, records), count, seed=seed, validation=data.validation, by=by)
    labelled = [[replace(one, label=record.label) for one, record in zip(fold, records)] for fold in divided]
    return write_folds(out / "folds", labelled)


def held_out(folds: Sequence[Path]) -> str:
    """The split that a fold holds out: val where the manifest had a test split, which is then that of all folds."""
    first, second = ({one.slide for one in read_splits(path) if one.split == "test"} for path in folds[:2])
    return "val" if first == second else "test"


def show(facts: dict[str, Any], console: Console) -> None:
    """The scores of all folds, of each, and pooled, as a table; a second one by patient."""
    levels = {"slide": (facts, [fold["slide"] for fold in facts["folds"]])}
    if "patient" in facts:
        levels["patient"] = facts["patient"], facts["patient"]["folds"]
    for level, (summary, each) in levels.items():
        table = Table(title=f"cross-validation, {len(each)} folds, by {level}", title_justify="left")
        for column in ("score", "mean ± sd", "pooled, 95 % interval", "folds"):
            table.add_column(column)
        for name, mean in summary["mean"].items():
            parts = " ".join(f"{values[name]:z.3f}" for values in each)
            pooled = str(Interval.of(summary["pooled"][name]))
            table.add_row(cell(name), f"{mean:z.3f} ± {summary['sd'][name]:z.3f}", pooled, parts)
        console.print(table)
