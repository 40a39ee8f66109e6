"""A run that dies and is continued ends with the weights of one that did not."""

from pathlib import Path

import pytest
import torch

from wsi_trainer.cli import main
from wsi_trainer.fit.run_folder import RunFolder
from wsi_trainer.models import SlideClassifier
from wsi_trainer.report.contents import read_curves


class Killed(RuntimeError):
    """Stands for the end of the process."""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(RunFolder(folder).checkpoint("last"), weights_only=False)["state_dict"]


@pytest.mark.parametrize("epoch", [1, 2])
def test_resumed_after_death_in_an_epoch(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    assert main(["fit", *words]) == 0
    interrupted = [*words, f"--out={tmp_path / 'killed'}"]

    def die(self: SlideClassifier, batch: object, batch_idx: int) -> None:
        if self.current_epoch == epoch and batch_idx == 3:
            raise Killed

    with monkeypatch.context() as context:
        context.setattr(SlideClassifier, "on_train_batch_start", die)
        with pytest.raises(Killed):
            main(["fit", *interrupted])
    assert main(["fit", *interrupted, "--resume=last"]) == 0
    expected, actual = weights(tmp_path / "run"), weights(tmp_path / "killed")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(value, actual[key]) for key, value in expected.items())
    curves = [read_curves(RunFolder(tmp_path / name).metrics) for name in ("run", "killed")]
    assert curves[0] == curves[1]
