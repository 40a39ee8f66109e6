"""`Predictor` on features: small bags are plain PyTorch, and as many as there are cost the same memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from lightning_plugin.planner.make import make_plan
from tests.wsi_trainer.small import QUICK
from wsi_trainer.cli import main
from wsi_trainer.errors import UserError
from wsi_trainer.fit import predictor
from wsi_trainer.fit.run import Run
from wsi_trainer.metrics import read_predictions

h5py = pytest.importorskip("h5py")
WIDTH = 8
LENGTHS = (3, 17, 20, 5, 33, 9, 64, 30)
SPLITS = ("train", "train", "train", "train", "val", "val", "test", "test")


def rows_of(number: int) -> torch.Tensor:
    """The features of a slide, which differ by its label."""
    draw = np.random.default_rng(number)
    found = draw.standard_normal((LENGTHS[number % len(LENGTHS)], WIDTH)) + number % 2
    return torch.from_numpy(found.astype(np.float32))


@pytest.fixture(scope="module")
def on_features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on features of slides that are absent."""
    folder = tmp_path_factory.mktemp("features")
    (folder / "features").mkdir()
    lines = ["slide,label,patient,split"]
    for number, split in enumerate(SPLITS):
        with h5py.File(folder / "features" / f"s{number}.h5", "w") as file:
            file["features"] = rows_of(number).numpy()
        lines.append(f"s{number}.svs,{number % 2},p{number},{split}")
    (folder / "manifest.csv").write_text("\n".join(lines) + "\n")
    words = [f"--data.manifest={folder / 'manifest.csv'}", f"--data.features={folder / 'features'}", *QUICK]
    network = [f"--model.backbone={{name: features, width: {WIDTH}}}", "--model.head={name: abmil, hidden: 8}"]
    train = ["--train.loggers=[csv]", "--train.budget=8MiB"]
    assert main(["fit", f"--out={folder / 'run'}", *words, *network, *train]) == 0
    return folder


def test_a_bag_of_features_is_plain_pytorch_whatever_the_budget_and_few_lengths_are_planned(
    on_features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[int, ...]] = []

    def noted(module: torch.nn.Module, image: tuple[int, ...], **options: object) -> object:
        planned.append(tuple(image))
        return make_plan(module, image, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(predictor, "make_plan", noted)
    run = Run.open(on_features / "run")
    model = run.loaded.model
    for number in range(len(LENGTHS)):
        found = run.predictor.predict(f"s{number}.svs")
        with torch.no_grad():
            plain = model.task.predict(model(rows_of(number).t()[None, :, :, None].contiguous()))
        assert found.values.tolist() == plain[0].double().tolist()
        file = run.predictor.predict(on_features / "features" / f"s{number}.h5")
        assert file.slide == f"s{number}" and file.values.tolist() == found.values.tolist()
    assert sorted(planned) == [(1, WIDTH, length, 1) for length in (4, 8, 16, 32, 64)]
    tested = read_predictions(run.predictions_file("test"))
    for slide, row in zip(tested.slides, tested.probabilities, strict=True):
        assert run.predictor.predict(slide).values.tolist() == row.tolist()
    monkeypatch.setattr(predictor, "WHOLE", 1 << 30)
    tiled = Run.open(run.path).predict("s6.svs")
    assert tiled == pytest.approx(run.predict("s6.svs"), rel=1e-5)


def test_as_many_predictions_as_wanted_keep_memory_and_descriptors(on_features: Path) -> None:
    run, process = Run.open(on_features / "run"), psutil.Process()

    def held() -> tuple[int, int]:
        for number in range(50):
            run.predict(f"s{number % len(LENGTHS)}.svs")
        return process.memory_info().rss, len(process.open_files())

    held()
    memory, files = held()
    for _ in range(3):
        now, still = held()
        assert now - memory < 4 << 20 and still == files


def test_a_model_of_features_names_what_it_takes(on_features: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.features has none of unknown\.h5"):
        Run.open(on_features / "run").predict(tmp_path / "unknown.svs")
