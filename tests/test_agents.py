"""The skill "make a model fit", step by step: for a dozen models, and for random ones of unknown answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from lightning_plugin import BudgetError, TiledModule, check, make_plan
from wsi_trainer.cli import main

KiB = 2**10
SKILL = Path(__file__).resolve().parents[1] / "skills" / "make-a-model-fit" / "SKILL.md"


def block(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU())


def classifier(*body: nn.Module, width: int = 8) -> nn.Module:
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class UNet(nn.Module):
    """A map at the end, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up = block(3, 8), block(8, 8), nn.ConvTranspose2d(8, 8, 2, 2)
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x)
        return self.last(torch.cat([first, self.up(self.deep(nn.functional.max_pool2d(first, 2)))], 1))


class Bag(nn.Module):
    """Patches, each encoded alone, and attention over them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(block(3, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.score, self.head = nn.Linear(8, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        features = self.encode(x)
        return self.head((torch.softmax(self.score(features), 0) * features).sum(0, keepdim=True))


class Sorted(nn.Module):
    """An operator without a rule: a barrier."""

    def __init__(self, spelled: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.spelled, self.head = block(3, 4), spelled, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.spelled(self.body(x)).mean((2, 3)))


@dataclass(frozen=True)
class Task:
    """A model, the shape of its input, and a budget that plain PyTorch exceeds."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    budget: int
    options: dict[str, Any] = field(default_factory=dict)


TASKS = {
    "convolutions": Task(lambda: classifier(block(3, 8), block(8, 8)), (1, 3, 256, 256), 2560 * KiB),
    "residual blocks": Task(lambda: classifier(block(3, 8), Residual(), Residual()), (1, 3, 192, 192), 2560 * KiB),
    "a batch": Task(lambda: classifier(block(3, 8)), (8, 3, 128, 96), 2560 * KiB),
    "strides and pooling": Task(
        lambda: classifier(nn.Conv2d(3, 8, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), block(8, 8)),
        (1, 3, 384, 320), 2560 * KiB,
    ),
    "a group norm": Task(
        lambda: classifier(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU()), (1, 3, 256, 192), 2560 * KiB
    ),
    "a map at the end": Task(UNet, (1, 3, 192, 192), 3584 * KiB),
    "a volume": Task(
        lambda: nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten()),
        (1, 1, 32, 48, 48), 2560 * KiB,
    ),
    "a sequence": Task(
        lambda: nn.Sequential(nn.Conv1d(4, 16, 9, padding=4), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()),
        (1, 4, 60_000), 3072 * KiB,
    ),
    "a bag of patches": Task(Bag, (60, 3, 32, 32), 2048 * KiB),
    "an operator that runs whole": Task(
        lambda: Sorted(lambda x: x.flip(3).sort(3).values), (1, 3, 128, 128), 3072 * KiB
    ),
    "parameters that do not fit": Task(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 40_000),
            nn.Linear(40_000, 4),
        ),
        (1, 3, 128, 128), 2048 * KiB, {"parameters": "host"},
    ),
    "several images in a step": Task(lambda: classifier(block(3, 8)), (1, 3, 192, 192), 4096 * KiB, {"calls": 2}),
}  # fmt: skip


def test_there_are_a_dozen_tasks_and_the_skill_names_every_step() -> None:
    assert len(TASKS) == 12
    _, head, text = SKILL.read_text().split("---\n", 2)
    about = yaml.safe_load(head)
    assert about["name"] == SKILL.parent.name and "Use it" in about["description"]
    named = ("wsi-train plan", "make_plan", "BudgetError", "barriers", "TiledModule", "SFTStrategy", "calls=", "check(")
    assert not [word for word in named if word not in text]


@dataclass
class Answer:
    """Result of the skill: the options of a plan that fits, or the smallest budget that works."""

    options: dict[str, Any] | None = None
    smallest: int = 0
    operator: str = ""


def follow(net: nn.Module, shape: tuple[int, ...], memory: int) -> Answer:
    """Steps 1 to 3 of the skill, with nothing known of the model."""
    weights = 2 * sum(p.nbytes for p in net.parameters())
    ways: list[dict[str, Any]] = [{}]
    refused = None
    while ways:
        options = ways.pop(0)
        try:
            make_plan(net, shape, budget=memory, device="cpu", **options)
            return Answer(options)
        except BudgetError as error:
            refused = refused or error
            if 2 * weights > memory and not options:
                ways = [{"parameters": "host"}, {"parameters": "disk"}]
    assert refused is not None
    return Answer(smallest=refused.smallest, operator=refused.operator)


def held_by(net: nn.Module, shape: tuple[int, ...]) -> int:
    """The bytes of plain PyTorch's parameters, gradients and what waits for backward."""
    weights = sum(p.nbytes for p in net.parameters())
    return 2 * weights + make_plan(net, shape, budget="4GiB", device="cpu").plain_bytes


def step(net: nn.Module, shape: tuple[int, ...], memory: int, options: dict[str, Any]) -> int:
    """The peak of one step."""
    tiled = TiledModule(net, budget=memory, **options)
    tiled(torch.rand(shape)).square().mean().backward()
    return tiled.peak_bytes


def checked(net: nn.Module, shape: tuple[int, ...], memory: int) -> Answer:
    """The answer for a model, after what it says was found true."""
    answer = follow(net, shape, memory)
    if answer.options is None:
        assert answer.smallest > memory and answer.operator
        make_plan(net, shape, budget=answer.smallest, device="cpu")
        return answer
    try:
        peak = step(net, shape, memory, answer.options)
    except BudgetError as error:  # step 5: a result that is a map is held whole
        answer = Answer(smallest=error.smallest, operator=error.operator)
        memory = error.smallest
        peak = step(net, shape, memory, {})
    assert 0 < peak <= memory
    net.zero_grad(set_to_none=True)
    assert check(net, torch.rand(shape)).exact
    return answer


@pytest.mark.full
@pytest.mark.parametrize("name", TASKS)
def test_a_model_is_made_to_fit_without_a_known_answer(name: str) -> None:
    """Into a half of what plain PyTorch holds, and into a two-hundredth, which may be too little."""
    task = TASKS[name]
    torch.manual_seed(0)
    net = task.make()
    held = held_by(net, task.shape)
    for share in (2, 200):
        checked(net, task.shape, held // share)


def random_task(seed: int) -> tuple[nn.Module, tuple[int, ...], int]:
    """A random convolutional network, and from a hundredth of what plain PyTorch holds to all of it."""
    random = Random(seed)
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    width = 3
    for _ in range(random.randint(1, 4)):
        layers.append(block(width, width := random.choice((4, 8, 16))))
        layers += random.choice(([], [nn.MaxPool2d(2)], [nn.AvgPool2d(3, 2, 1)], [nn.GroupNorm(2, width)], [nn.GELU()]))
    hidden = random.choice((4, 4000))
    net = nn.Sequential(classifier(*layers, width=width), nn.Linear(2, hidden), nn.Linear(hidden, 2))
    shape = (random.choice((1, 3)), 3, random.randrange(32, 96, 8), random.randrange(32, 96, 8))
    return net, shape, int(held_by(net, shape) * 10 ** random.uniform(-2, 0))


@pytest.mark.slow
def test_random_models_are_made_to_fit(count: Callable[..., int]) -> None:
    answers = [checked(*random_task(seed)) for seed in range(count(ci=2, full=200))]
    fitted = [answer for answer in answers if answer.options is not None]
    assert fitted and len(fitted) < len(answers), "neither all budgets nor none suffice"


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_model_is_made_to_fit(name: str) -> None:
    task = TASKS[name]
    torch.manual_seed(0)
    net = task.make()
    options = {key: value for key, value in task.options.items() if key != "calls"}
    # 1. Ask before anything runs.
    plan = make_plan(net, task.shape, budget=task.budget, device="cpu", **options)
    assert plan.peak_bytes <= task.budget
    # 4. Wrap the module; one step of several calls, if it has them, keeps the budget.
    tiled = TiledModule(net, budget=task.budget, **task.options)
    images = [torch.rand(task.shape) for _ in range(task.options.get("calls", 1))]
    sum(tiled(image).square().mean() for image in images).backward()  # type: ignore[union-attr]
    assert 0 < tiled.peak_bytes <= task.budget
    # 5. Compare once, on a size that plain PyTorch can hold.
    assert check(net, torch.rand(task.shape)).exact


def test_an_error_names_a_budget_that_works_and_the_operator_that_sets_it() -> None:
    net = TASKS["convolutions"].make()
    with pytest.raises(BudgetError, match="smallest budget that works") as refused:
        make_plan(net, (1, 3, 512, 512), budget="8KiB", device="cpu")
    assert refused.value.operator
    make_plan(net, (1, 3, 512, 512), budget=refused.value.smallest, device="cpu")


def test_a_barrier_is_named_by_the_plan(tmp_path: Path) -> None:
    plan = make_plan(TASKS["an operator that runs whole"].make(), (1, 3, 128, 128), budget="3MiB", device="cpu")
    assert plan.barriers
    plan = make_plan(Sorted(lambda x: x.flip(3)), (1, 3, 128, 128), budget="3MiB", device="cpu")
    assert not plan.barriers


def test_the_command_of_the_section_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small_net.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Conv2d(3, 4, 3, padding=1)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--model=small_net:net", "--image=1024x768", "--budget=8MiB"]) == 0
    assert "on the device" in capsys.readouterr().out
