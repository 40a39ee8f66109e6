"""One small run of each command of the command line, and what is there before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.faults.places import COMMON
from tests.faults.runs import Server

Words = Callable[[str], list[str]]
"""The words of a run, given its folder."""
ALONE = ["--workers=1", "--stall_minutes=0"]


@dataclass(frozen=True)
class Command:
    """A run.

    Args:
        words: The command.
        before: What is there: the name of a state.
        out: The folder that it writes to, for results that cannot be written.
        again: The words of a rerun, where they are others.
        free: Files that differ from run to run, or that are further ones after a rerun, as patterns of their names.
        short: Whether few runs of it are made, because each is long.
        processes: Whether slides are read in processes of their own.
    """

    words: Words
    before: str = "ran"
    out: str = "run"
    again: Words | None = None
    free: tuple[str, ...] = field(default=())
    short: bool = False
    processes: bool = False


def config(now: str) -> str:
    return f"--config={now}/run/config.yaml"


def fit(now: str, *more: str) -> list[str]:
    return [
        "fit", *COMMON, f"--out={now}/out", f"--data.manifest={now}/in/slides/manifest.csv", "--train.epochs=2",
        "--train.budget=null", "--train.checkpoint_every=1", "--model.dropout=0.3", *more,
    ]  # fmt: skip


def tiled(now: str, *more: str) -> list[str]:
    return [word for word in fit(now, *more) if "budget" not in word] + ["--train.budget=6MiB"]


LAST = "--ckpt_path=last"
COMMANDS: Mapping[str, Command] = {
    "preprocess": Command(lambda n: ["preprocess", f"{n}/in/two", f"{n}/out", *ALONE], "slides", "out"),
    "preprocess, in processes": Command(
        lambda n: ["preprocess", f"{n}/in/two", f"{n}/out", "--workers=2", "--stall_minutes=0.1"], "slides", "out",
        short=True, processes=True,
    ),
    "tissue": Command(lambda n: ["tissue", f"{n}/in/two", f"{n}/out", *ALONE], "slides", "out"),
    "verify": Command(lambda n: ["verify", f"{n}/in/stores", "--workers=1"], "slides", "in/stores"),
    "plan": Command(
        lambda n: ["plan", config(n), "--image=512x512", "--train.budget=4MiB", f"--json={n}/out/plan.json"],
        out="out",
    ),
    "fit": Command(fit, "slides", "out", lambda n: fit(n, LAST)),
    "fit, in tiles": Command(tiled, "slides", "out", lambda n: tiled(n, LAST)),
    "fit, resumed": Command(lambda n: fit(n, LAST), "cut short", "out"),
    "status": Command(lambda n: ["status", f"{n}/run"]),
    "embed": Command(
        lambda n: ["embed", f"--config={n}/in/embed.yaml", f"--out={n}/out", "--batch=4"], "slides", "out"
    ),
    "export": Command(lambda n: ["export", config(n), f"--file={n}/out/encoder.pt"], out="out"),
    "validate": Command(lambda n: ["validate", config(n)]),
    "test": Command(lambda n: ["test", config(n)]),
    "predict": Command(lambda n: ["predict", config(n), f"--slides={n}/in/slides/manifest.csv"]),
    "segment": Command(
        lambda n: ["segment", f"--config={n}/segmented/config.yaml", "--smallest=0"], "segmented", "segmented"
    ),
    "heatmap": Command(lambda n: ["heatmap", config(n), f"--regions={n}/in/slides/lesions", "--size=64"]),
    "report": Command(lambda n: ["report", f"{n}/run"]),
    "view --static": Command(lambda n: ["view", f"{n}/run", f"--static={n}/out/copy"], out="out"),
    # What cannot be removed is left to the system's folder of temporary files.
    "doctor": Command(lambda n: ["doctor"], "slides", "out", free=("tmp/wsi-train-doctor-*", "tmp/????????")),
}  # fmt: skip


def slides(server: Server) -> None:
    server.place.begin()
    run(server, [str(server.place.now)], "tests.faults.material:make")


def ran(server: Server) -> None:
    now = str(server.place.now)
    run(server, [word.replace(f"{now}/out", f"{now}/run") for word in fit(now)])


def segmented(server: Server) -> None:
    now = str(server.place.now)
    run(server, [
        "fit", *COMMON[3:], "--model.backbone=wsi_trainer.models.UNet", "--model.backbone.widths=[2,4]",
        "--model.task={class_path: SegmentationTask, init_args: {classes: [normal, lesion]}}",
        "--train.monitor=val_dice", "--train.budget=null", "--train.epochs=1", f"--out={now}/segmented",
        f"--data.manifest={now}/in/slides/manifest.csv",
    ])  # fmt: skip


def cut_short(server: Server) -> None:
    run(server, fit(str(server.place.now)), "tests.faults.material:cut_short")


#: How each state is made, all but the first from the first.
STATES: Mapping[str, Callable[[Server], None]] = {
    "slides": slides,
    "ran": ran,
    "segmented": segmented,
    "cut short": cut_short,
}


def bring(server: Server, state: str) -> None:
    """A state, which is made where it is asked for first."""
    place = server.place
    if not (place.base / state).is_dir():
        if state != "slides":
            bring(server, "slides")
        STATES[state](server)
        place.keep(state)
    place.bring(state)


def run(server: Server, words: list[str], target: str = "wsi_trainer.cli:main") -> None:
    server.seam.arm((), "through")
    ended = server.run(words, target)
    if ended.code:
        raise RuntimeError(f"{words} ended with {ended.code}: {ended.said[-3000:]}")
