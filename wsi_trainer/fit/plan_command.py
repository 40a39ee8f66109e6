"""The command `plan`: what a training step on a slide of some size would be, without slide or device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from wsi_trainer.errors import UserError
from wsi_trainer.fit.command import instantiate, make_parser, parse
from wsi_trainer.fit.config import AUTO
from wsi_trainer.fit.planning import plan_step


def plan(words: Sequence[str]) -> int:
    """Plan a model at an image size under a memory budget, and print the plan."""
    parser = make_parser("plan", "Plan a training step of a config: where tensors live, tile grids, cost.")
    parser.add_argument("--height", type=int, required=True, help="height of the slide in pixels")
    parser.add_argument("--width", type=int, required=True, help="width of the slide in pixels")
    parser.add_argument("--device", type=str, default="cpu", help="whose speed ranks the plans: cpu, cuda")
    parser.add_argument("--json", type=Path, default=None, help="also write the plan to this file")
    parser.add_argument("--picture", type=Path, default=None, help="also draw memory over the step, as PNG")
    options = parse(parser, words)
    model, data, config = instantiate(parser, options)
    if config.budget is None or config.budget == AUTO:
        raise UserError("a plan needs a budget: give --train.budget, such as 8GiB")
    factors = [factor / data.downsample for factor in data.context]
    found = plan_step(model, options.height, options.width, config.budget, options.device, factors)
    Console(width=160).print(str(found), highlight=False, markup=False)
    if options.json is not None:
        options.json.write_text(found.to_json() + "\n", encoding="utf-8")
    if options.picture is not None:
        found.draw(str(options.picture))
    return 0
