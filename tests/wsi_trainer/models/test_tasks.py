"""Each task against its definition: loss, predictions, targets from the manifest's cells."""

import math

import numpy as np
import pytest
import torch

from wsi_trainer.errors import UserError
from wsi_trainer.metrics import (
    ClassPredictions,
    MultiLabelPredictions,
    RiskPredictions,
    ValuePredictions,
)
from wsi_trainer.models import (
    BinaryTask,
    CoxTask,
    HazardTask,
    MultiClassTask,
    MultiLabelTask,
    OrdinalTask,
    RegressionTask,
    Task,
)
from wsi_trainer.models.tasks import Owners, partial_likelihood

TASKS: list[tuple[Task, list[dict[str, str]], type]] = [
    (BinaryTask(["no", "yes"]), [{"label": "no"}, {"label": "yes"}], ClassPredictions),
    (MultiClassTask("abc"), [{"label": "c"}, {"label": "a"}], ClassPredictions),
    (OrdinalTask(["low", "mid", "high"]), [{"label": "high"}, {"label": "low"}], ClassPredictions),
    (MultiLabelTask(["x", "y"]), [{"x": "1", "y": ""}, {"x": "no", "y": "TRUE"}], MultiLabelPredictions),
    (RegressionTask("age"), [{"age": "61.5"}, {"age": "40"}], ValuePredictions),
    (HazardTask(), [{"time": "3", "event": "1"}, {"time": "9.5", "event": "0"}], RiskPredictions),
    (CoxTask("months", "dead"), [{"months": "3", "dead": "1"}, {"months": "9", "dead": "0"}], RiskPredictions),
]


@pytest.mark.parametrize(("task", "cells", "kind"), TASKS, ids=lambda x: type(x).__name__)
def test_goes_from_cells_to_a_loss_and_to_predictions_with_scores(
    task: Task, cells: list[dict[str, str]], kind: type
) -> None:
    torch.manual_seed(0)
    targets = torch.cat([task.target(line) for line in cells])
    logits = torch.randn(2, task.outputs, dtype=torch.float64, requires_grad=True)
    loss = task.double().loss(logits, targets)
    loss.backward()
    assert loss.shape == () and logits.grad is not None and logits.grad.isfinite().all()
    predicted = task.predict(logits.detach())
    assert predicted.shape == (2, len(task.names))
    predictions = task.predictions(Owners(("s", "t"), ("p", "q")), targets.double().numpy(), predicted.detach().numpy())
    assert type(predictions) is kind and len(predictions) == 2
    assert all(isinstance(score(predictions), float) for score in task.scores.values())
    assert all(isinstance(task.stratum(line), str) for line in cells)


@pytest.mark.parametrize(
    ("task", "cells", "message"),
    [
        (MultiClassTask("ab"), {"label": "c"}, "label 'c', which is none of the classes 'a', 'b'"),
        (MultiLabelTask(["x"]), {"x": "maybe"}, "x 'maybe'; it must be 0 or 1"),
        (MultiLabelTask(["x", "y"]), {"x": "", "y": ""}, "no label at all in the columns x, y"),
        (RegressionTask(), {"label": "old"}, "label 'old', which is not a number"),
        (RegressionTask(), {"label": "inf"}, "finite"),
        (HazardTask(), {"time": "-1", "event": "1"}, "cannot be negative"),
        (CoxTask(), {"time": "1", "event": "2"}, "event '2'; it must be 0 or 1"),
    ],
)
def test_a_wrong_cell_is_named(task: Task, cells: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        task.target(cells)


def test_label_smoothing_mixes_in_the_other_class() -> None:
    logit = torch.tensor([[0.4]])
    plain, smooth = BinaryTask(), BinaryTask(label_smoothing=0.2)
    losses = [float(plain.loss(logit, torch.tensor([label]))) for label in (0, 1)]
    assert float(smooth.loss(logit, torch.tensor([1]))) == pytest.approx(0.9 * losses[1] + 0.1 * losses[0])


def test_balanced_weights_come_from_the_training_slides() -> None:
    targets = torch.tensor([0, 0, 0, 1])
    binary, classes = BinaryTask(positive_weight="balanced"), MultiClassTask("abc", class_weights="balanced")
    binary.prepare(targets)
    assert binary.weight.values.tolist() == [3.0]
    classes.prepare(targets)
    assert classes.weights.values.tolist() == pytest.approx([4 / 6, 4 / 2, 1.0])
    labels = MultiLabelTask(["x", "y"], positive_weights="balanced")
    labels.prepare(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, float("nan")]]))
    assert labels.weights.values.tolist() == [2.0, 1.0]
    assert "weights.values" in classes.state_dict()  # a continued run, and a test, use the same ones


def test_ordinal_probabilities_are_differences_of_a_logistic_and_sum_to_one() -> None:
    task = OrdinalTask("abcd").double()
    with torch.no_grad():
        task.gaps.copy_(torch.tensor([0.3, -1.0]))
    logits = torch.tensor([[-40.0], [-1.0], [0.0], [2.5], [60.0]], dtype=torch.float64)
    p = task.probabilities(logits)
    torch.testing.assert_close(p.sum(dim=1), torch.ones(5, dtype=torch.float64))
    above = torch.sigmoid(logits - task.thresholds)
    torch.testing.assert_close(p[1:4, 1], (above[:, 0] - above[:, 1])[1:4])
    assert (task.thresholds.diff() > 0).all()
    # Far from all thresholds a difference of logistics would be 0 and its logarithm infinite.
    far = task.loss(logits[4:], torch.tensor([1])).detach()
    assert far.isfinite() and float(far) > 50


def test_regression_is_learnt_in_units_of_the_training_slides() -> None:
    task = RegressionTask()
    task.prepare(torch.tensor([40.0, 60.0, 80.0]))
    assert float(task.predict(torch.tensor([[0.0]]))) == pytest.approx(60)
    assert float(task.loss(torch.tensor([[0.0]]), torch.tensor([60.0 + math.sqrt(800 / 3)]))) == pytest.approx(1)
    for loss, expected in (("absolute", 2.0), ("huber", 1.5)):
        assert float(RegressionTask(loss=loss).loss(torch.tensor([[0.0]]), torch.tensor([2.0]))) == expected


def test_hazards_multiply_to_the_likelihood() -> None:
    task = HazardTask(ends=[1.0, 2.0, 4.0]).double()
    logits = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    h = torch.sigmoid(logits)[0]

    def likelihood(time: float, event: float) -> float:
        return math.exp(-float(task.loss(logits, torch.tensor([[time, event]]))))

    assert likelihood(0.5, 1) == pytest.approx(float(h[0]))
    assert likelihood(2.0, 1) == pytest.approx(float((1 - h[0]) * h[1]))  # an interval holds its end
    assert likelihood(3.0, 0) == pytest.approx(float((1 - h[0]) * (1 - h[1])))  # the third was not completed
    assert likelihood(2.0, 0) == pytest.approx(float((1 - h[0]) * (1 - h[1])))
    assert likelihood(9.0, 1) == pytest.approx(float((1 - h[0]) * (1 - h[1]) * (1 - h[2]) * h[3]))
    risk, *survival = task.predict(logits)[0].tolist()
    np.testing.assert_allclose(survival, torch.cumprod(1 - h, dim=0).numpy())
    assert risk == pytest.approx(-sum(survival))


def test_intervals_hold_equal_numbers_of_events() -> None:
    task = HazardTask(intervals=4)
    events = torch.arange(1.0, 101)
    task.prepare(torch.stack([torch.cat([events, events]), torch.cat([torch.ones(100), torch.zeros(100)])], dim=1))
    assert task.ends.tolist() == pytest.approx([25.75, 50.5, 75.25])
    with pytest.raises(ValueError, match="2 training slides with an event do not make 4 intervals"):
        HazardTask(intervals=4).prepare(torch.tensor([[3.0, 1.0], [3.0, 1.0], [5.0, 0.0]]))


def test_the_partial_likelihood_by_hand() -> None:
    risks, times = torch.tensor([0.2, -0.5, 1.0]), torch.tensor([1.0, 2.0, 3.0])
    e = risks.exp()
    expected = -(risks[0] - e.sum().log()) - (risks[1] - (e[1] + e[2]).log())
    actual = partial_likelihood(risks, times, torch.tensor([1.0, 1.0, 0.0]))
    assert float(actual) == pytest.approx(float(expected) / 2)
    assert float(partial_likelihood(risks, times, torch.zeros(3))) == 0


def test_cox_compares_a_slide_with_those_before_it_as_constants() -> None:
    task = CoxTask(memory=2)
    targets = torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 0.0]])
    logits = torch.tensor([[0.2], [-0.5], [1.0]], requires_grad=True)
    for i in range(3):
        loss = task.loss(logits[i : i + 1], targets[i : i + 1])
    expected = partial_likelihood(logits[:, 0], targets[:, 0], targets[:, 1])
    assert loss.item() == pytest.approx(expected.item())
    (gradient,) = torch.autograd.grad(loss, logits)
    (whole,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(gradient, torch.tensor([[0.0], [0.0], [float(whole[2])]]))
    assert task.remembered[:, 0].tolist() == [1.0, -0.5]  # the newest two
    task.eval().loss(logits[:1], targets[:1])
    assert task.remembered[:, 0].tolist() == [1.0, -0.5]
