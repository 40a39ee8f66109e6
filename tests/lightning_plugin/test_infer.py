"""`infer` writes what plain PyTorch computes: box by box, exactly, and on from where it was interrupted."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_plugin import Box, BudgetError, LazyImage, SinkError, TensorSource, TiledModule, TileSource, infer
from lightning_plugin.infer import digest_of
from lightning_plugin.private import tree_leaves
from lightning_plugin.residency.homes import Homes
from tests.lightning_plugin.dense import Dense, dense_networks
from tests.lightning_plugin.planner.peaks import STATUS, of_status
from tests.warm import start

BLOCKS = ["group", "relu", "squeeze", "stride", "instance", "windows", "convolution"]


def made(blocks: list[str] = BLOCKS, results: Iterable[int] = ()) -> Dense:
    torch.manual_seed(0)
    return Dense(blocks, set(results)).double().eval()


def image(height: int = 120, width: int = 150) -> Tensor:
    return torch.randn(1, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).abs().max() / right.double().abs().max())


def empty_like(results: Iterable[Tensor]) -> list[Tensor]:
    return [torch.full_like(t, 77) for t in results]


@given(dense_networks(), st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_random_networks_are_those_of_plain_pytorch(case: tuple[Dense, Tensor], tiles: tuple[int, int]) -> None:
    net, x = case
    with torch.no_grad():
        right = net(x)
        rounded = copy.deepcopy(net).float()(x.float())
    found, small, classes = empty_like(right), empty_like(rounded), empty_like([right[-1][:, 0].to(torch.uint8)])
    infer(net, x, found, tiles=tiles)
    assert max(map(error, found, right)) < 1e-9
    infer(copy.deepcopy(net).float(), x.float(), small, tiles=tiles)
    for tiled, plain, exact in zip(small, rounded, right, strict=True):
        assert error(tiled, exact) < 8 * error(plain, exact) + 1e-6
    infer(net, x, [None] * (len(right) - 1) + classes, tiles=3, output="classes")
    assert torch.equal(classes[0], right[-1].argmax(1).to(torch.uint8))


def test_all_kinds_of_sources_and_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net, x = made(), image()
    right = net(x)[-1].detach()
    np.save("image.npy", x.numpy())
    stored = zarr.create_array("image.zarr", shape=x.shape, dtype="float64", chunks=(1, 3, 50, 50))
    stored[:] = x.numpy()
    sources = [x, TensorSource(x), LazyImage(TensorSource(x)), np.load("image.npy", mmap_mode="r"), stored]
    tensor = torch.zeros_like(right)
    mapped = np.lib.format.open_memmap("mapped.npy", "w+", np.float64, tuple(right.shape))
    array = zarr.create_array("array.zarr", shape=right.shape, dtype="float64", chunks=(1, 6, 20, 20))
    sinks = [tensor, mapped, array, "new.npy", Path("new.zarr")]
    for source, sink in zip(sources, sinks, strict=True):
        infer(net, source, [sink], tiles=3)
    found = [tensor, np.load("mapped.npy"), array[:], np.load("new.npy"), zarr.open_array("new.zarr")[:]]
    assert [error(torch.as_tensor(values), right) < 1e-12 for values in found] == [True] * 5
    assert not list(tmp_path.glob("*.boxes")), "a run that has ended leaves no record"


class Several(nn.Module):
    """Results of many kinds, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 4, stride=4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.conv(x)
        return {
            "tokens": x.flatten(2).transpose(1, 2),
            "pooled": x.mean((2, 3)),
            "spectrum": torch.fft.fft2(x).real,
            "position": torch.fft.fft2(x).abs() + x,
            "view": x[:, 1:3, ::2],
        }


def test_results_by_name_of_any_layout() -> None:
    net, x = Several().double().train(), image(48, 60)
    with torch.no_grad():
        right = net(x)
    found = {name: torch.zeros_like(t) for name, t in right.items() if name != "view"}
    infer(net, x, found, tiles=(3, 4))
    assert all(error(found[name], right[name]) < 1e-12 for name in found)
    assert net.training and net.conv.training, "modules have their own modes again"
    view = torch.zeros_like(right["view"])
    infer(net, x, {"view": view, "tokens": None}, budget="20KiB")
    assert error(view, right["view"]) < 1e-12


def test_classes_and_probabilities() -> None:
    net, x = nn.Conv2d(3, 5, 3, padding=1).double(), image()
    right = net(x).detach()
    classes = torch.full((1, 120, 150), 9, dtype=torch.uint8)
    infer(net, x, classes, output="classes", tiles=4)
    assert torch.equal(classes, right.argmax(1).to(torch.uint8))
    shares = torch.zeros(right.shape, dtype=torch.uint8)
    infer(net, x, shares, output="probabilities", tiles=4)
    assert torch.equal(shares, (right.softmax(1) * 255).round().to(torch.uint8))
    single = nn.Conv2d(3, 1, 3, padding=1).double()
    infer(single, x, classes, output="classes", tiles=4)
    assert torch.equal(classes, (single(x)[:, 0] > 0).to(torch.uint8))
    with pytest.raises(ValueError, match="scores"):
        infer(nn.MaxPool2d(2), torch.zeros(1, 3, 8, 8, dtype=torch.int64), classes, output="classes", tiles=2)


class Sparse(TileSource):
    """Noise in one corner, white elsewhere; counts the pixels that are read."""

    dtype = torch.float64

    def __init__(self, side: int, corner: int) -> None:
        self.shape, self.corner, self.pixels = (1, 3, side, side), corner, 0
        self.noise = image(corner, corner)

    def constant(self, box: Box) -> Tensor | None:
        return torch.ones(3, dtype=self.dtype) if max(box.lo) >= self.corner else None

    def read(self, box: Box) -> Tensor:
        self.pixels += box.positions
        values = torch.ones(1, 3, *box.extent, dtype=self.dtype)
        inside = box.intersect(Box.whole((self.corner, self.corner)))
        if not inside.empty:
            (top, left), (bottom, right) = inside.lo, inside.hi
            there = values[:, :, top - box.lo[0] : bottom - box.lo[0], left - box.lo[1] : right - box.lo[1]]
            there[:] = self.noise[:, :, top:bottom, left:right]
        return values


def test_background_is_computed_once_and_written_everywhere() -> None:
    net, source = made(["group", "relu", "squeeze", "stride", "convolution"]), Sparse(600, 100)
    whole = source.read(Box.whole((600, 600)))
    with torch.no_grad():
        right = net(whole)[-1]
    found, source.pixels = torch.zeros_like(right), 0
    infer(net, source, [found], tiles=12)
    assert error(found, right) < 1e-12
    assert source.pixels < 0.6 * whole[0, 0].numel(), "in two passes"


class Failing:
    """A sink into a file that fails at a box."""

    def __init__(self, path: Path, left: int) -> None:
        self.path, self.left, self.written = path, left, 0

    def open(self, shape: tuple[int, ...], dtype: torch.dtype, resumes: bool) -> None:
        self.array = np.lib.format.open_memmap(self.path, "r+" if resumes else "w+", np.float64, shape)

    def write(self, box: Box, values: Tensor) -> None:
        if self.written == self.left:
            raise OSError(28, "No space left on device")
        self.written += 1
        self.array[tuple(slice(lo, hi) for lo, hi in box.intervals())] = values.numpy()

    def close(self) -> None:
        self.array.flush()


def test_a_full_sink_keeps_its_boxes_and_the_same_call_goes_on(tmp_path: Path) -> None:
    net, x, record = made(results=[2]), image(), tmp_path / "record"
    (tmp_path / "whole").mkdir()
    whole = [tmp_path / "whole" / f"{i}.npy" for i in range(2)]
    infer(net, x, whole, budget="400KiB")
    first, second = Failing(tmp_path / "a.npy", 99), Failing(tmp_path / "b.npy", 3)
    with pytest.raises(SinkError, match=r"result 1: .*No space left") as caught:
        infer(net, x, [first, second], budget="400KiB", record=record)
    assert f"{first.written + 3} boxes are finished" in caught.value.__notes__[0]
    sinks = [Failing(tmp_path / "a.npy", 99), Failing(tmp_path / "b.npy", 99)]
    with torch.no_grad():
        next(net.parameters()).add_(1)
    with pytest.raises(SinkError, match="other weights"):
        infer(net, x, sinks, budget="400KiB", record=record)
    with torch.no_grad():
        next(net.parameters()).sub_(1)
    with pytest.raises(SinkError, match="other options"):
        infer(net, x, sinks, budget="300KiB", record=record)
    assert not any(sink.written for sink in sinks)
    infer(copy.deepcopy(net), x, sinks, budget="400KiB", record=record)
    assert sinks[0].written == 0 and sinks[1].written, "nothing is written twice"
    for path, name in zip(whole, ("a", "b"), strict=True):
        assert path.read_bytes() == (tmp_path / f"{name}.npy").read_bytes()
    assert not record.exists()


class Broken(Sparse):
    """A source that cannot be read at the end."""

    def read(self, box: Box) -> Tensor:
        if box.hi[0] == self.shape[2]:
            raise OSError("block 7 of slide.tif is damaged")
        return super().read(box)

    def constant(self, box: Box) -> None:
        return None


def test_a_broken_source_is_named_and_its_boxes_stay(tmp_path: Path) -> None:
    net = made(["convolution", "relu"])
    with pytest.raises(OSError, match="block 7") as caught:
        infer(net, Broken(200, 100), [tmp_path / "a.npy"], budget="800KiB")
    assert "boxes are finished and stay" in caught.value.__notes__[0]
    source = Sparse(200, 100)
    infer(net, source, [tmp_path / "a.npy"], budget="800KiB")
    assert source.pixels < 200 * 200, "the rest"
    with torch.no_grad():
        right = net(source.read(Box.whole((200, 200))))[-1]
    assert error(torch.from_numpy(np.load(tmp_path / "a.npy")), right) < 1e-12


def test_what_does_not_fit_is_refused_before_the_first_box(tmp_path: Path) -> None:
    net, source = made(["relu", "group"]), Sparse(40, 20)
    right = torch.zeros(1, 6, 40, 40, dtype=torch.float64)
    with pytest.raises(BudgetError, match="smallest budget that works") as refused:
        infer(net, source, [tmp_path / "a.npy"], budget="3KiB")
    infer(net, Sparse(40, 20), [right], budget=refused.value.smallest)
    (tmp_path / "there.npy").touch()
    for sink, message in [
        (torch.zeros(1, 6, 40, 20), r"shape \(1, 6, 40, 20\), and the result has the shape \(1, 6, 40, 40\)"),
        (torch.zeros(1, 6, 40, 40, dtype=torch.uint8), "cannot hold the result's torch.float64"),
        (tmp_path / "there.npy", "is there already"),
        (tmp_path / "a.bmp", "no kind of file"),
        (3, "not int"),
    ]:
        with pytest.raises(SinkError, match=message):
            infer(net, source, [sink], budget="1MiB")
    for sinks, message in [(right, "a list of sinks"), ([right, right], "2 sinks"), ({"x": right}, "no 'x'")]:
        with pytest.raises(SinkError, match=message):
            infer(net, source, sinks, budget="1MiB")
    with pytest.raises(ValueError, match="has its options already"):
        infer(TiledModule(net, tiles=2), source, [right], budget="1MiB")
    assert source.pixels == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there.npy"]


def write(folder: Path, left: int = 0) -> None:
    """A run into files, which is killed when it opens its record that many times."""
    torch.set_num_threads(1)
    if left:
        from tests.stopping import counting

        counting(".boxes", left, signal.SIGKILL)
    infer(made(results=[1]), image(200, 250), [folder / "a.zarr", folder / "b.npy"], budget="300KiB")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_killed_and_resumed(
    tmp_path: Path, count: Callable[..., int], record_result: Callable[[str, dict[str, Any]], None]
) -> None:
    """At touches of the record, the first of which begins it: so with boxes that are written and not noted."""
    whole = tmp_path / "whole"
    whole.mkdir()
    write(whole)
    right = contents(whole)
    moments = [4, 9, 14, 3, 2, 6, 7, 11, 12, 17][: count(ci=1, full=10)]
    for touches in moments:
        folder = tmp_path / str(touches)
        folder.mkdir()
        for left in (touches, 0):
            process = start(tmp_path / "log.txt", write, folder, left)
            process.join()
            log = (tmp_path / "log.txt").read_text()
            assert process.exitcode == (-signal.SIGKILL if left else 0), log
            assert (folder / "a.zarr.boxes").exists() == bool(left)
        assert contents(folder) == right
    record_result("infer_kills", {"kills": len(moments), "same bytes": len(moments)})


def test_a_tiled_module_serves_many_images() -> None:
    """Its engine keeps plans and programs, and nothing of an image or of a sink."""
    net = TiledModule(made(), budget="400KiB")
    listener = net.engine.listener
    for seed in range(4):
        x = image() + seed
        with torch.no_grad():
            (right,) = tree_leaves(net.module(x))
        found = torch.zeros_like(right)
        plan = infer(net, x, [found])
        assert plan is net.plan and not any(words in str(plan) for words in ("gradients", "for backward"))
        assert error(found, right) < 1e-9
    assert net.engine.listener is listener and not net.engine.progress.listeners


def test_a_weight_of_one_number_may_have_any_stride() -> None:
    net = nn.Conv2d(1, 1, 1).double()
    net.bias = nn.Parameter(torch.as_strided(torch.ones(4, dtype=torch.float64), (1,), (3,)))
    image = torch.randn(1, 1, 20, 20, dtype=torch.float64)
    found = torch.zeros_like(image)
    infer(net, image, found, tiles=2)
    assert torch.allclose(found, net(image))


@pytest.mark.skipif(not STATUS.exists(), reason="the system does not tell a process's memory")
def test_weights_in_files_stay_out_of_the_process() -> None:
    with torch.device("meta"):
        net = TiledModule(nn.Sequential(*(nn.Linear(512, 512) for _ in range(24))), budget="1GiB")
    net.build()
    before = of_status("RssFile") + of_status("RssShmem")
    digest = digest_of(net, net.engine.homes)
    after = of_status("RssFile") + of_status("RssShmem")
    assert after - before < 2**22 < sum(p.nbytes for p in net.parameters())
    assert digest == digest_of(copy.deepcopy(net.module), Homes())
