"""The command `plan`, and plans of a model's step: what a training step on an image of some size would be."""

from __future__ import annotations

import importlib
import re
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import track
from rich.text import Text
from torch import Tensor, nn

from lightning_plugin import BudgetError, LazyImage, PixelsError, Plan, make_plan, sweep
from lightning_plugin.options import ModuleOptions
from lightning_plugin.planner.analysis.recorded import Blank
from wsi_trainer import models
from wsi_trainer.cli.parsing import Parser
from wsi_trainer.data.dataset import DataConfig
from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import AUTO, TrainConfig, check_bags, instantiate, make_parser, parse
from wsi_trainer.fit.cost import UNLIMITED, count_pixels, divided, shapes_of, study_cost
from wsi_trainer.models import Backbone, SlideClassifier, SlideModel, SlideSegmenter
from wsi_trainer.models.allowed import limits_imports
from wsi_trainer.models.backbones import timm_network
from wsi_trainer.models.batch import side_by_side

T = TypeVar("T")

#: Budgets of a sweep.
POINTS = 10
#: Arguments of `make_plan` that are given otherwise, or decide nothing about a plan for a size.
OWN: set[str | int] = {
    "module", "image", "dtype", "device", "optimizer", "budget", "tiles", "backward_tiles", "wobble", "compile", "trim",
    "calls", "policy",
}  # fmt: skip
#: Pixels on a side that numbers of bytes still have room for.
LARGEST = 10_000_000


@limits_imports
def plan(words: Sequence[str]) -> int:
    """Plan a model at an image size under a memory budget, and print the plan."""
    step = config_step(words) if names_config(words) else model_step(words)
    return step()


def names_config(words: Sequence[str]) -> bool:
    """True where the model is that of a config, in a file or by its keys, rather than one named by `--model`."""
    config = [w for w in words if w.partition("=")[0] == "--config" or re.match(r"--(model|data|train)\.|--out\b", w)]
    named = [w for w in words if w.partition("=")[0] == "--model"]
    if config and named:
        raise UserError(f"--model names a model and {config[0].partition('=')[0]} describes one; give one of the two")
    return bool(config)


def add_options(parser: ArgumentParser, bags: bool = False) -> None:
    """The options of both forms; one of them may plan for a bag instead of an image."""
    size: dict[str, Any] = {"default": None} if bags else {"required": True}
    parser.add_argument("--image", type=str, metavar="WxH", help="size in pixels, as 20480x20480", **size)
    if bags:
        text = "instead of --image, where the config has data.patches: how many patches the bag has"
        parser.add_argument("--patches", type=int, default=None, metavar="K", help=text)
    parser.add_argument(
        "--device", type=str, default="cpu", help="whose speed ranks the plans: cpu, cuda:a100, ...; need not be there"
    )
    parser.add_argument(
        "--optimizer", type=str, default=None, help="count what it keeps for each parameter: adamw, sgd, ..."
    )
    parser.add_function_arguments(make_plan, as_group=False, skip=OWN)
    parser.add_argument("--json", type=Path, default=None, help="also write the plan to this file")
    parser.add_argument("--picture", type=Path, default=None, help="also draw memory over the step, as PNG")
    parser.add_argument(
        "--sweep", type=Literal["budget"], default=None, help="also plan for other budgets, and print time against them"
    )
    parser.add_argument("--sweep_picture", type=Path, default=None, help="draw the sweep, as PNG")


def config_step(words: Sequence[str]) -> Callable[[], int]:
    """The step of a config's classifier on a slide."""
    parser = make_parser("plan", "Plan a training step of a config: where tensors live, tile grids, cost.")
    parser.add_argument("--budget", type=str, default=None, help="device memory; without it train.budget")
    add_options(parser, bags=True)
    text = "without --image: how many folds of the manifest's slides are trained, as for `fit --folds`"
    parser.add_argument("--folds", type=int, default=None, help=text)
    options = parse(parser, words)
    model, data, config = instantiate(parser, options)
    budget = options.budget or config.budget
    if budget is None or budget == AUTO:
        raise UserError("a plan needs a budget: give --budget or --train.budget, such as 8GiB")
    factors = factors_of(data)

    def planned(then: Callable[[nn.Module, torch.dtype], Any]) -> Any:
        return then(step_of(model, factors), torch.uint8)

    if options.image is not None or options.patches is not None:
        if options.folds is not None:
            raise UserError("--folds is about all slides of data.manifest, and not about one size; leave one out")
        return partial(report, planned, options, budget, shape_of(data, model, options))
    return partial(cohort_step, planned, options, budget, model, data, config)


def cohort_step(
    planned: Callable[..., Any], options: Namespace, budget: str, model: SlideModel, data: DataConfig,
    config: TrainConfig,
) -> int:  # fmt: skip
    """Plan a step on the largest slide of the manifest, and print what all slides, epochs and folds cost."""
    check_bags(model, data)
    if data.features is not None:
        raise UserError("a head on data.features trains in minutes; a plan is for networks that see pixels")
    if not data.manifest.is_file():
        size = "--image WxH, as 20480x20480" if data.patches is None else "--patches K, as 10000"
        raise UserError(f"a plan needs {size}, or the slides: there is no data.manifest {data.manifest}")
    runs = divided(model, data, config.seed, options.folds)
    shapes = shapes_of(runs[0], data)
    largest = max(shapes.values(), key=count_pixels)
    plan = planned_for(planned, options, budget, largest)
    plain = plan_shape(model, largest, UNLIMITED, options.device, factors_of(data)) or plan
    Console().print(Text("\n" + "\n".join(study_cost(runs, shapes, plan, plain, model, config))), soft_wrap=True)
    return 0


def factors_of(data: DataConfig) -> list[float]:
    """Ratio of the resolution of the image to that of each further magnification."""
    return [factor / data.downsample for factor in data.extra_downsamples]


def shape_of(data: DataConfig, model: SlideModel, options: Namespace) -> tuple[int, ...]:
    """The shape of the input of a config's step: an image, or a bag of patches."""
    check_bags(model, data)
    wanted, other = ("image", "patches") if data.patches is None else ("patches", "image")
    if options[other] is not None:
        why = "not given" if data.patches is None else "given"
        raise UserError(f"--{other} does not go with this config, whose data.patches is {why}; give --{wanted}")
    if data.patches is None:
        return image_shape(options.image)
    if options.patches < 1:
        raise UserError(f"--patches is {options.patches}; it must be 1 or more")
    return (options.patches, 3, data.patches.size, data.patches.size)


def model_step(words: Sequence[str]) -> Callable[[], int]:
    """The step of a model by name."""
    parser = Parser(
        prog="wsi-train plan",
        description="Plan a training step under a memory budget, without image, device or activations: where tensors "
        "live, tile grids, cost. The model is named by --model; or it is that of a config, with the options of "
        "`wsi-train fit`: see `wsi-train plan --config CONFIG --help`.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        type=str,
        required=True,
        help="a backbone (VGG, ResNet, ...) in a slide classifier; timm:NAME; or package.module:callable, which "
        "returns a module",
    )
    parser.add_argument("--budget", type=str, required=True, help="device memory for the step, as 512MiB or 11GiB")
    parser.add_argument("--config", default=SUPPRESS, help="plan the model of this config instead of --model")
    add_options(parser)
    options = parse(parser, words)
    build = build_model(options.model)

    def planned(then: Callable[[nn.Module, torch.dtype], Any]) -> Any:
        return on_any_device(
            build,
            lambda module: then(step_of(module), torch.uint8 if isinstance(module, SlideModel) else torch.float32),
        )

    return partial(report, planned, options, options.budget, image_shape(options.image))


def step_of(module: nn.Module, factors: Sequence[float] = ()) -> nn.Module:
    """The module as it trains; a slide classifier with its further magnifications, each so much coarser."""
    module.train()
    if not isinstance(module, SlideModel):
        return module
    module.standardise.eval()  # it would write the statistics of a slide that is not there
    return Step(module, factors or [4.0**level for level in range(1, module.magnifications)])


def report(planned: Callable[..., Any], options: Namespace, budget: str, shape: tuple[int, ...]) -> int:
    """Plan, print, and write what was asked for."""
    planned_for(planned, options, budget, shape)
    return 0


def planned_for(planned: Callable[..., Any], options: Namespace, budget: str, shape: tuple[int, ...]) -> Plan:
    """The plan, printed and written where that was asked for."""
    if options.sweep_picture is not None and options.sweep is None:
        raise UserError("--sweep-picture draws a sweep; give --sweep budget too")
    console = Console(width=200)
    names = {"device", "optimizer", *ModuleOptions.__annotations__} & set(vars(options))
    arguments: dict[str, Any] = {name: options[name] for name in names} | {"budget": budget}

    def run(module: nn.Module, dtype: torch.dtype) -> tuple[Plan, Any]:
        if options.sweep is None:
            return make_plan(module, shape, dtype=dtype, **arguments), None
        tell = partial(track, description="planning", console=Console(stderr=True), transient=True)
        found = sweep(module, shape, dtype=dtype, count=POINTS, tell=tell, **arguments)
        assert found.asked is not None
        return found.asked, found

    found: Plan
    try:
        found, swept = planned(run)
    except ValueError as error:  # a size or a device that the engine does not know
        raise UserError(str(error)) from error
    console.print(Text(str(found)))
    if swept is not None:
        console.print(Text(f"\n{swept}"))
    if options.json is not None:
        options.json.write_text(found.to_json() + "\n", encoding="utf-8")
    if options.picture is not None:
        found.draw(str(options.picture))
    if options.sweep_picture is not None:
        swept.draw(str(options.sweep_picture))
    return found


def image_shape(image: str) -> tuple[int, ...]:
    """The shape of an image of this size."""
    width, height = pixels(image)
    return (1, 3, height, width)


def pixels(image: str) -> tuple[int, int]:
    """Width and height from a text such as `20480x20480`."""
    found = re.fullmatch(r"\s*(\d+)\s*[x×]\s*(\d+)\s*", image)
    if found is None or not int(found[1]) or not int(found[2]):
        raise UserError(f"--image: '{image}' is not a size in pixels; write width x height, as 20480x20480")
    if max(int(found[1]), int(found[2])) > LARGEST:
        raise UserError(f"--image: '{image}' has more than {LARGEST} pixels on a side")
    return int(found[1]), int(found[2])


def build_model(name: str) -> Callable[[], nn.Module]:
    """A function that makes the network of a name: a backbone, `timm:NAME`, or `package.module:callable`."""
    if name.startswith("timm:"):
        return partial(timm_network, name.removeprefix("timm:"), num_classes=None)  # with its own head
    if ":" in name:
        return imported(*name.rsplit(":", 1))
    return backbone(name)


def on_any_device(build: Callable[[], nn.Module], use: Callable[[nn.Module], T]) -> T:
    """Use a network whose parameters are on the meta device, or, if it cannot live there, one with real parameters."""
    try:
        with torch.device("meta"):
            module = build()
        return use(module)
    except (BudgetError, ValueError, UserError):
        raise  # would be the same on any device
    except (RuntimeError, NotImplementedError):  # something reads the values of a parameter or a buffer
        return use(build())


def backbone(name: str) -> Callable[[], nn.Module]:
    """A slide classifier with one of the application's backbones."""
    known = {n: cls for n, cls in vars(models).items() if isinstance(cls, type) and issubclass(cls, Backbone)}
    known.pop("Backbone")
    found = {n.lower(): cls for n, cls in known.items()}.get(name.lower())
    if found is None:
        raise UserError(
            f"--model: there is no backbone '{name}'; valid: {', '.join(sorted(known))}, timm:NAME, "
            "package.module:callable"
        )
    make: Callable[[], nn.Module] = found
    return lambda: SlideClassifier(backbone=make())


def imported(module_name: str, attribute: str) -> Callable[[], nn.Module]:
    """A function that makes the network of a name in an importable module; the working folder counts."""
    where = f"--model: {module_name}:{attribute}"
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{where} cannot be imported: {error}") from error
    finally:
        sys.path.remove(here)
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, [n for n in dir(found) if not n.startswith("_")], n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise UserError(f"{where}: '{part}' is not in {getattr(found, '__name__', found)}{hint}")
        found = getattr(found, part)

    def make() -> nn.Module:
        try:
            module = found if isinstance(found, nn.Module) else found()
        except TypeError as error:
            raise UserError(f"{where} has to work without arguments: {error}") from error
        if not isinstance(module, nn.Module):
            raise UserError(f"{where} is a {type(module).__name__}; it must be a module, or return one")
        return module

    return make


def blank(*shape: int) -> LazyImage:
    """An image of which only the shape is known."""
    return LazyImage(Blank(shape, torch.uint8))


class Step(nn.Module):
    """A model with all that it sees of a slide beside the image: further magnifications, and where tissue is."""

    def __init__(self, model: SlideModel, factors: Sequence[float]) -> None:
        super().__init__()
        self.model = model
        self.factors = tuple(factors)

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[2:]
        shapes = [(height, width), *((int(height / f), int(width / f)) for f in self.factors)]
        context = [blank(1, 3, *shape) for shape in shapes[1:]]
        tissue: list[Tensor] = []
        if self.model.wants_tissue:
            stride = self.model.stride
            tissue = [blank(1, 1, -(-rows // stride), -(-columns // stride)) for rows, columns in shapes]
        beside = self.model.covariates.width
        covariates = self.model.mean.new_zeros(1, beside) if beside else None
        if not isinstance(self.model, SlideSegmenter):
            patches = image.shape[0] if getattr(self.model.backbone, "bags", False) else height
            places = side_by_side(patches) if self.model.wants_places else None
            return self.model(image, context, tissue, places=places, covariates=covariates)
        logits, vector = self.model.at_pixels_and_pooled(image, tissue[0] if tissue else None)
        loss = self.model.pixels.loss(logits, blank(1, 1, height, width))  # a step needs no more of pixels
        return loss if vector is None else torch.cat([loss[None], self.model.forward_head(vector, covariates)[0]])


def plan_shape(
    model: SlideModel,
    shape: tuple[int, ...],
    budget: str | int,
    device: str = "cpu",
    factors: Sequence[float] = (),
) -> Plan | None:
    """The plan of a training step on an image, (1, 3, height, width), or on a bag, (patches, 3, size, size).

    None for a network that reads values while it runs, as a BatchNorm over tissue does that two magnifications share:
    its step is planned in parts, each where it runs.
    """
    try:
        return make_plan(step_of(model, factors), shape, budget=budget, device=device, dtype=torch.uint8)
    except PixelsError:
        return None
    finally:
        model.train()
