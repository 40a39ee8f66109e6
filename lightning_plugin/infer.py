"""`infer`: a module's result on an image of any size, box by box from a source into a sink.

See [Note: sinks] in `sink` for how results are written, and for runs that go on where another one was interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from lightning_plugin.capture.lazy import LazyImage, LazyTensor
from lightning_plugin.capture.record import Recorder
from lightning_plugin.capture.run import run
from lightning_plugin.engine import Engine
from lightning_plugin.errors import SinkError
from lightning_plugin.graph import Recording, Value
from lightning_plugin.memory import default_budget
from lightning_plugin.module import TiledModule
from lightning_plugin.ops import Autocast, has_gradients
from lightning_plugin.options import ModuleOptions
from lightning_plugin.plan import Plan
from lightning_plugin.private import dense_bytes
from lightning_plugin.progress import Kind
from lightning_plugin.residency.homes import Homes
from lightning_plugin.sink import Output, PathSink, Record, Sink, Write, sink_of
from lightning_plugin.source import ArraySource, TileSource

Values = Literal["values", "classes", "probabilities"]
#: Suffix of the record beside a file that is written.
RECORD = ".boxes"


def infer(
    net: nn.Module,
    source: Any,
    sink: Any,
    *,
    output: Values = "values",
    record: str | Path | None = None,
    progress: bool = True,
    **options: Unpack[ModuleOptions],
) -> Plan:
    """Compute a module's maps of an image and write them box by box: the values of the whole image, without seams.

    The module is in eval mode and without gradients meanwhile. Every part of the image is computed once, or as often as
    the plan says: a statistic over the image (GroupNorm, attention, squeeze and excitation) needs all of its map before
    the rest can go on. Background that the source knows to be one value is computed once for all identical tiles. ::

        infer(net, source, "classes.zarr", output="classes", budget="2GiB")

    Args:
        net: The module, which is called with the image; or a `TiledModule`, which has its options.
        source: The image: a tensor, a `TileSource`, a `LazyImage`, or an array ``(N, C, *spatial)`` that is read by
            slices, such as NumPy's ``memmap`` or one of Zarr's.
        sink: What takes the result: a tensor or an array of its shape, a path ``NAME.npy`` or ``NAME.zarr`` that is not
            there yet, or a `Sink`. If the module returns several tensors, a sequence or a dictionary of sinks, by place
            or by name; results without a sink, or with None, are not computed.
        output: "values" are the module's. "classes" are the places of the largest channel, as ``argmax(1)``, in 8 bits
            if there are no more than 256; of a single channel those above 0. "probabilities" are the softmax over
            channels, or the sigmoid of a single one, times 255 and rounded, in 8 bits.
        record: A file that lists the boxes that are written, so that the same call goes on after an interruption;
            beside the first sink that is a path it is made without being asked for. It is removed at the end.
        progress: Show a bar with the time left, on a terminal.
        options: Those of `lightning_plugin.options.ModuleOptions`; without a budget that of the device.

    Returns:
        The plan that was run.

    Raises:
        BudgetError: The budget is too small; nothing was read or written. It names the smallest one.
        SinkError: A sink does not fit the result, or has failed. Boxes that were written stay.
    """
    if output not in get_args(Values):
        raise ValueError(f"output={output!r}: give {', '.join(map(repr, get_args(Values)))}")
    if isinstance(net, TiledModule):
        if options:
            raise ValueError(f"{', '.join(options)}: a TiledModule has its options already")
        tiled = net
    else:
        if options.keys().isdisjoint(("budget", "tiles")):
            options["budget"] = default_budget(device_of(net))
        tiled = TiledModule(net, **options)
    with in_eval_mode(tiled), torch.no_grad():
        tensors = chosen(tiled(image_of(source, device_of(net))), sink)
        results = [(as_output(t, output), sink_of(given)) for t, given in tensors]
        del tensors  # what has no sink is not computed
        path = Path(record) if record is not None else record_beside([s for _, s in results])
        with Run(tiled, results, Record.at(path), output, progress) as writing:
            writing.write()
    assert writing.plan is not None
    return writing.plan


class Run:
    """One call of `infer`: listens to its plan, prepares the sinks when there is one, and shows progress.

    Attributes:
        module: The module.
        results: The results with their sinks.
        record: The boxes that are written.
        plan: The plan that writes; None before there is one.
    """

    def __init__(
        self,
        module: TiledModule,
        results: Sequence[tuple[Tensor, Sink]],
        record: Record,
        output: str,
        progress: bool,
    ) -> None:
        self.module = module
        self.engine: Engine = module.engine
        self.results = results
        self.record = record
        self.output = output
        self.plan: Plan | None = None
        self.bar = Bar(progress)
        self.before = self.engine.listener
        self.resumes = record.header is not None

    def __enter__(self) -> Run:
        if self.record.header is not None:
            self.check_record(self.record.header)
        self.engine.listener = self
        self.engine.progress.listeners.append(self.bar)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.engine.listener = self.before
        self.engine.progress.listeners.remove(self.bar)
        self.bar.close()
        if error is None:
            self.record.finish()
        elif self.plan is not None and self.record.path is not None:
            error.add_note(
                f"{len(self.record.done)} boxes are finished and stay: the same call goes on with the others, by "
                f"{self.record.path}."
            )

    def write(self) -> None:
        """Add what writes to the recording of the module's call, and run it."""
        outputs = [Output(i, sink, self.record) for i, (_, sink) in enumerate(self.results)]
        lazy = {i: t for i, (t, _) in enumerate(self.results) if isinstance(t, LazyTensor)}
        if not lazy:
            raise SinkError("the module returned nothing that depends on the image")
        session = next(iter(lazy.values()))._session.root()
        if session.transcript is not None:
            session.transcript.place = None  # what follows belongs to this call alone
        maps = {i: v for i, t in lazy.items() if (v := t._value).is_map}
        wanted = {i: write_node(t, maps[i], outputs[i]) if i in maps else t._value for i, t in lazy.items()}
        self.is_asked = set(wanted.values())
        found = dict(zip(wanted, run(session, list(wanted.values())), strict=True))
        for i, (t, _) in enumerate(self.results):
            if i not in maps:  # a small result, or one that an operator without a rule has made whole
                whole = found.get(i, t)
                outputs[i].take_whole(whole.detach())
        for _, sink in self.results:
            sink.close()

    # The engine's listener of plans

    def on_new_plan(self, plan: Plan, structure: str, random_splits: bool = False) -> None:
        if self.before is not None:
            self.before.on_new_plan(plan, structure, random_splits)

    def on_plan_run(self, plan: Plan, recording: Recording, ranks: int = 1) -> None:
        """Before the plan that writes: note it, or compare it with that of the interrupted run, and open the sinks."""
        if self.before is not None:
            self.before.on_plan_run(plan, recording, ranks)
        self.bar.begin(plan)
        if self.is_asked.isdisjoint(v for n in recording.nodes for v in n.outputs):
            return  # the module asks for a value, such as `x.max().item()`
        files = [sink for _, sink in self.results if isinstance(sink, PathSink)]
        for file in files:
            file.check(self.resumes)
        self.open_sinks([(t, sink) for t, sink in self.results if sink not in files])
        self.plan = plan
        self.record.begin({**self.facts(), "plan": plan.to_json(), "planner": self.engine.planner.state_dict()})
        assert self.record.header is not None
        if self.record.header["plan"] != plan.to_json():
            raise SinkError(f"{self.record.path} is of a run by another plan, since {OTHERS}")
        try:
            self.open_sinks([(t, sink) for t, sink in self.results if sink in files])  # the record says whose they are
        except SinkError:
            if not self.resumes:
                self.record.finish()
            raise

    def open_sinks(self, results: Sequence[tuple[Tensor, Sink]]) -> None:
        for t, sink in results:
            sink.open(tuple(t.shape), t.dtype, self.resumes)

    # The record

    def facts(self) -> dict[str, Any]:
        """Return what two runs have in common of which one goes on with the other."""
        results = [[list(t.shape), str(t.dtype)] for t, _ in self.results]
        weights = "" if self.record.path is None else digest_of(self.module, self.engine.homes)
        return {"version": 1, "results": results, "output": self.output, "weights": weights}

    def check_record(self, header: Mapping[str, Any]) -> None:
        """Refuse the record of a run of something else, and take over its plans."""
        differing = [name for name, value in self.facts().items() if header.get(name) != value]
        if not differing and not self.engine.planner.load_state_dict(header["planner"]):
            differing = ["options"]
        if differing:
            raise SinkError(f"{self.record.path} is of a run with other {' and '.join(differing)}, and {OTHERS}")


OTHERS = "its boxes cannot be completed by this one: give the same module, image, sinks and options, or remove it"


def device_of(net: nn.Module) -> torch.device:
    """Return the device of a module's parameters."""
    return next((t.device for t in (*net.parameters(), *net.buffers())), torch.device("cpu"))


def image_of(source: Any, device: torch.device) -> LazyImage:
    """Return an image that is read from a source."""
    if isinstance(source, LazyImage):
        return source
    if isinstance(source, (Tensor, TileSource)):
        return LazyImage(source, device=device)
    return LazyImage(ArraySource(source), device=device)


@contextmanager
def in_eval_mode(net: nn.Module) -> Iterator[None]:
    """Put all modules into eval mode, and back into their own modes at the end."""
    modes = [(m, m.training) for m in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


def chosen(returned: Any, sinks: Any) -> list[tuple[Tensor, Any]]:
    """Return the tensors that have a sink, each with it."""
    if isinstance(sinks, Mapping):
        by_name = returned if isinstance(returned, Mapping) else getattr(returned, "__dict__", {})
        missing = sinks.keys() - by_name.keys()
        if missing:
            raise SinkError(
                f"the module returns no {min(missing)!r}; it returns {', '.join(map(repr, by_name)) or 'no names'}"
            )
        found = [(by_name[name], given) for name, given in sinks.items()]
    elif isinstance(sinks, (list, tuple)):
        if not isinstance(returned, (list, tuple)) or len(returned) < len(sinks):
            count = len(returned) if isinstance(returned, (list, tuple)) else "no sequence of"
            raise SinkError(f"there are {len(sinks)} sinks, and the module returns {count} tensors")
        found = list(zip(returned, sinks, strict=False))
    else:
        found = [(returned, sinks)]
    found = [(t, given) for t, given in found if given is not None]
    for t, _ in found:
        if not isinstance(t, Tensor):
            raise SinkError(
                f"the module returns a {type(t).__name__} where there is one sink: give a list of sinks, or a "
                "dictionary by name, for the tensors in it"
            )
    return found


def as_output(t: Tensor, output: str) -> Tensor:
    """Return the classes or the probabilities of a map of scores."""
    if output == "values":
        return t
    if not has_gradients(t.dtype) or t.dim() < 2:
        raise ValueError(
            f"output={output!r} is of scores (N, classes, ...), and the module returns {t.dtype} {t.shape}"
        )
    channels = t.shape[1]
    if output == "classes":
        found = t.argmax(1) if channels > 1 else t[:, 0] > 0
        return found.to(torch.uint8 if channels <= 256 else torch.int32)
    shares = t.softmax(1) if channels > 1 else t.sigmoid()
    return (shares * 255).round().to(torch.uint8)


def record_beside(sinks: Sequence[Sink]) -> Path | None:
    """Return the path of the record beside the first sink that is a path."""
    path = next((s.path for s in sinks if isinstance(s, PathSink)), None)
    return None if path is None else path.with_name(path.name + RECORD)


def write_node(t: LazyTensor, value: Value, output: Output) -> Value:
    """Record that a map is written; return the number of its boxes."""
    recorder = Recorder(t._session.root(), None, Autocast.current(t.device))
    fake = recorder.fake((), torch.int64, t.device)
    return recorder.emit(Write(value.space, output), [value], [fake], None, "write")[0]


def digest_of(net: nn.Module, homes: Homes) -> str:
    """Return a digest of a module's parameters and buffers. Of those in files no pages stay in memory."""
    found = hashlib.sha256()
    for name, t in net.state_dict().items():
        found.update(f"{name} {tuple(t.shape)} {t.dtype}".encode())
        found.update(dense_bytes(t.reshape(-1)).data)
        homes.release_pages_of([t])
    return found.hexdigest()


class Bar:
    """Bar of tiles with the time left, each tile weighed by the predicted seconds of its segment."""

    def __init__(self, is_shown: bool) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        hidden = not (is_shown and console.is_terminal)
        self.progress = Progress(*columns, console=console, transient=True, disable=hidden)
        self.task = self.progress.add_task("infer", total=None)
        self.left: list[tuple[int, float]] = []

    def begin(self, plan: Plan) -> None:
        self.left = [
            (s.forward.tiles, max(s.forecast.seconds, 1e-9) / s.forward.tiles) for s in plan.segments if not s.keep
        ]
        self.progress.reset(self.task, total=sum(tiles * seconds for tiles, seconds in self.left) or None)
        self.progress.start()

    def on_tiles(self, count: int) -> None:
        done = 0.0
        while count and self.left:
            tiles, seconds = self.left[0]
            some = min(count, tiles)
            done, count = done + some * seconds, count - some
            self.left[0] = (tiles - some, seconds)
            if some == tiles:
                self.left.pop(0)
        self.progress.advance(self.task, done)

    def on_identical_tiles(self, count: int) -> None:
        return

    def on_wait(self, kind: Kind, seconds: float) -> None:
        return

    def close(self) -> None:
        self.progress.stop()
