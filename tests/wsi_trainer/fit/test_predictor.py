"""`Predictor`: what it says of slides, of any kind of input, from a run, a checkpoint and an exported folder."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from lightning_plugin.planner.make import make_plan
from tests.wsi_trainer.small import QUICK
from wsi_trainer.cli import main
from wsi_trainer.data.dataset import DataConfig, dense
from wsi_trainer.data.patches import PatchConfig, open_bag
from wsi_trainer.errors import UserError
from wsi_trainer.fit import predictor
from wsi_trainer.fit.config import Loaded, TrainConfig
from wsi_trainer.fit.predictor import Predictor
from wsi_trainer.fit.run import Run
from wsi_trainer.metrics import read_predictions
from wsi_trainer.models import VGG, AttentionPooling, PatchEncoder, ResNet, SlideClassifier
from wsi_trainer.models.hub import FILES
from wsi_trainer.slide import Slide
from wsi_trainer.slide.views import Image
from wsi_trainer.synthetic import SlideSpec, write_slide

h5py = pytest.importorskip("h5py")
WIDTH = 8
LENGTHS = (3, 17, 20, 5, 33, 9, 64, 30)
SPLITS = ("train", "train", "train", "train", "val", "val", "test", "test")


def rows_of(number: int) -> torch.Tensor:
    """The features of a slide, which differ by its label."""
    draw = np.random.default_rng(number)
    found = draw.standard_normal((LENGTHS[number % len(LENGTHS)], WIDTH)) + number % 2
    return torch.from_numpy(found.astype(np.float32))


def places_of(number: int) -> np.ndarray:
    """Corners of its patches of 64 pixels, in rows of four."""
    places = np.arange(LENGTHS[number % len(LENGTHS)])
    return np.stack([places % 4, places // 4], axis=1) * 64


@pytest.fixture(scope="module")
def on_features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on features of slides that are absent."""
    folder = tmp_path_factory.mktemp("features")
    (folder / "features").mkdir()
    lines = ["slide,label,patient,split"]
    for number, split in enumerate(SPLITS):
        with h5py.File(folder / "features" / f"s{number}.h5", "w") as file:
            file["features"] = rows_of(number).numpy()
            file["coords"] = places_of(number)
        lines.append(f"s{number}.svs,{number % 2},p{number},{split}")
    (folder / "manifest.csv").write_text("\n".join(lines) + "\n")
    words = [f"--data.manifest={folder / 'manifest.csv'}", f"--data.features={folder / 'features'}", *QUICK]
    network = [f"--model.backbone={{name: features, width: {WIDTH}}}", "--model.head={name: abmil, hidden: 8}"]
    train = ["--train.loggers=[csv]", "--train.budget=8MiB"]
    assert main(["fit", f"--out={folder / 'run'}", *words, *network, *train]) == 0
    return folder


@pytest.mark.slow
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

    memory, files = zip(*(held() for _ in range(5)), strict=True)
    assert len(set(files[1:])) == 1
    # A leak grows in each round; what the C library or the garbage collector keeps does not.
    assert min(after - before for before, after in itertools.pairwise(memory[1:])) < 1 << 20


def test_a_model_of_features_names_what_it_takes(on_features: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.features has none of unknown\.h5"):
        Run.open(on_features / "run").predict(tmp_path / "unknown.svs")


def test_a_slide_of_the_run_that_is_given_by_its_path_has_its_patient(on_features: Path) -> None:
    pytest.importorskip("pandas")
    found = Run.open(on_features / "run").predict([on_features / "s6.svs", on_features / "s7.svs"])
    assert found[["slide", "patient"]].values.tolist() == [["s6.svs", "p6"], ["s7.svs", "p7"]]
    assert Predictor.open(on_features / "run").record_of(on_features / "new.svs").patient == "new.svs"


def test_a_run_of_double_precision_keeps_each_bit_of_its_weights(on_features: Path, tmp_path: Path) -> None:
    words = [f"--data.manifest={on_features / 'manifest.csv'}", f"--data.features={on_features / 'features'}", *QUICK]
    network = [f"--model.backbone={{name: features, width: {WIDTH}}}", "--model.head={name: abmil, hidden: 8}"]
    train = ["--train.loggers=[csv]", "--train.precision=64-true"]
    assert main(["fit", f"--out={tmp_path / 'run'}", *words, *network, *train]) == 0
    run = Run.open(tmp_path / "run")
    kept = torch.load(run.checkpoint(), weights_only=True)["state_dict"]
    weights = run.loaded.model.state_dict()
    assert all(weights[name].equal(kept[name]) for name in kept) and torch.float64 in {w.dtype for w in kept.values()}
    tested = read_predictions(run.predictions_file("test"))
    for slide, row in zip(tested.slides, tested.probabilities, strict=True):
        assert run.predictor.predict(slide).values.tolist() == row.tolist()
    assert main(["export", str(run.path), f"--out={tmp_path / 'model'}"]) == 0
    file = on_features / "features" / "s6.h5"
    assert Predictor.open(tmp_path / "model").predict(file).to_dict() == run.predict(file)


def test_attention_and_features_of_a_bag_of_features_have_its_places(on_features: Path) -> None:
    run = Run.open(on_features / "run")
    found = run.predictor.predict("s6.svs")
    rows = rows_of(6)
    scores = run.loaded.model.scores(rows.t()[None, :, :, None].contiguous())
    np.testing.assert_allclose(found.attention.weights, torch.softmax(scores.detach().flatten(), 0), rtol=1e-4)
    np.testing.assert_array_equal(found.attention.places.points, places_of(6))
    assert found.attention.places.side == 64
    np.testing.assert_array_equal(found.features, rows)


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    path = tmp_path / "slide.tif"
    write_slide(path, SlideSpec(200, 264, seed=2, slide=1, patient=1, positive=True))
    return path


def in_memory(backbone: nn.Module, folder: Path, **data: Any) -> Predictor:
    """A predictor of a network with attention that was never trained."""
    torch.manual_seed(0)
    model = SlideClassifier(backbone=backbone, head=AttentionPooling)
    train = TrainConfig(accelerator="cpu", budget="64MiB")
    return Predictor(Loaded(model, DataConfig(manifest=folder / "none.csv", **data), train))


def test_attention_and_features_of_an_image_lie_on_its_squares(slide: Path, tmp_path: Path) -> None:
    predictor = in_memory(VGG((4, 8), convs=1), tmp_path, downsample=2)
    found, model = predictor.predict(slide), predictor.model
    assert isinstance(model, SlideClassifier)
    with Image(Slide.open(slide), factor=2) as image, torch.no_grad():
        pixels = dense(image)
        features, scores = model.backbone(model.normalise(pixels))[0], model.scores(pixels)
    np.testing.assert_allclose(found.features, features, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.attention.weights, torch.softmax(scores.flatten(), 0), rtol=1e-4)
    places, columns = found.attention.places, scores.shape[3]
    assert places.slide == (200, 264) and places.side == 2 * model.stride
    assert places.points[columns + 1].tolist() == [places.side, places.side]


def test_attention_and_features_of_a_bag_lie_on_its_patches(slide: Path, tmp_path: Path) -> None:
    patches = PatchConfig(size=32, mpp="own", over="slide")
    predictor = in_memory(PatchEncoder(ResNet((4, 8), norm="group"), 32), tmp_path, patches=patches)
    found, model = predictor.predict(slide), predictor.model
    assert isinstance(model, SlideClassifier)
    with open_bag(Slide.open(slide), patches) as bag, torch.no_grad():
        pixels, places = dense(bag), bag.places
        scores = torch.softmax(model.scores(pixels).flatten(), 0)
        features = model.backbone(model.normalise(pixels))[0, :, :, 0].t()
    np.testing.assert_allclose(found.features, features, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.attention.weights, scores, rtol=1e-4)
    np.testing.assert_array_equal(found.attention.places.points, places.points)


def test_a_model_without_a_run_has_no_card(slide: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="comes from no run"):
        in_memory(VGG((4, 8), convs=1), tmp_path).save_pretrained(tmp_path / "out")


@pytest.fixture
def exported(on_features: Path, tmp_path: Path) -> Path:
    assert main(["export", str(on_features / "run"), f"--out={tmp_path / 'exported'}"]) == 0
    return tmp_path / "exported"


def test_a_checkpoint_and_an_exported_folder_give_the_numbers_of_the_run(
    on_features: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written, and nothing of the run is needed."""
    file = on_features / "features" / "s6.h5"
    run = Run.open(on_features / "run", "last")
    expected = run.predictor.predict(file).to_dict()
    assert Predictor.open(run.checkpoint()).predict(file).to_dict() == expected
    expected = Predictor.open(run.path).predict(file).to_dict()
    monkeypatch.chdir(exported)  # the folder of the run is nowhere named
    for name in ("mkdir", "replace", "unlink"):
        monkeypatch.setattr(os, name, forbidden)
    before = {path: path.read_bytes() for path in exported.iterdir()}
    found = Predictor.from_pretrained(exported)
    assert found.predict(file).to_dict() == expected
    assert SlideClassifier.from_pretrained(exported).training is False
    assert {path: path.read_bytes() for path in exported.iterdir()} == before
    with pytest.raises(UserError, match="give the file of a slide's features"):
        found.predict("s6.svs")


def forbidden(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_an_exported_folder_tells_what_the_model_is_and_names_nobody(
    on_features: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sorted(path.name for path in exported.iterdir()) == sorted(FILES)
    card = (exported / "README.md").read_text()
    for said in ("probability_0, probability_1", "FrozenFeatures, AttentionPooling", "4 slides of 4 patients"):
        assert said in card
    assert "| auc |" in card and "| torch |" in card and "library_name: wsi-trainer" in card
    for name in ("README.md", "about.json", "config.json"):
        text = (exported / name).read_text()
        assert str(on_features) not in text and "s6" not in text and "p6" not in text
    words = ["export", str(on_features / "run")]
    for more, said in (
        ([f"--out={exported}"], "is there already"),
        ([], "one of the two"),
        ([f"--out={tmp_path / 'a'}", f"--file={tmp_path / 'a.pt'}"], "one of the two"),
    ):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    Predictor.open(exported).save_pretrained(tmp_path / "again")
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes(), name


def test_the_table_of_the_card_holds_any_name_of_a_class(on_features: Path, tmp_path: Path) -> None:
    found = Predictor.open(on_features / "run")
    found.model.task.classes = ("low | none", "two\nlines")
    found.save_pretrained(tmp_path / "model")
    table = [
        line for line in (tmp_path / "model" / "README.md").read_text().splitlines() if line.startswith("| classes")
    ]
    assert table == ["| classes | low \\| none, two\\nlines |"]


def test_an_exported_folder_that_was_changed_is_refused(exported: Path) -> None:
    weights = exported / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-8])
    with pytest.raises(UserError, match="cut short or damaged"):
        Predictor.open(exported)
    weights.write_bytes(kept)
    config = exported / "config.json"
    config.write_text(config.read_text().replace("wsi_trainer.models.AttentionPooling", "os.system"))
    with pytest.raises(UserError, match=r"os\.system"):
        Predictor.open(exported)


def test_a_model_goes_to_the_hub_and_comes_back(
    on_features: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    there = tmp_path / "there"

    class Api:
        def __init__(self, **_: object) -> None: ...

        def create_repo(self, repo_id: str, **_: object) -> SimpleNamespace:
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, repo_id: str, folder_path: Path, **_: object) -> str:
            shutil.copytree(folder_path, there)
            return f"https://hub/{repo_id}"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: str(there))
    assert Predictor.open(exported).push_to_hub("me/first", private=True) == "https://hub/me/first"
    for name in FILES:
        assert (there / name).read_bytes() == (exported / name).read_bytes(), name
    file = on_features / "features" / "s6.h5"
    found = Predictor.from_pretrained("me/first", revision="main")
    assert found.predict(file).to_dict() == Predictor.open(exported).predict(file).to_dict()
