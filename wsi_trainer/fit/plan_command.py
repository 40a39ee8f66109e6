"""The command `plan`: what a training step on a slide of some size would be, without slide or device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from lightning_plugin import Plan, make_plan
from wsi_trainer.errors import UserError
from wsi_trainer.fit.command import instantiate, make_parser, parse
from wsi_trainer.models import SlideClassifier


def plan(words: Sequence[str]) -> int:
    """Plan a model at an image size under a memory budget, and print the plan."""
    parser = make_parser("plan", "Plan a training step of a config: where tensors live, tile grids, cost.")
    parser.add_argument("--height", type=int, required=True, help="height of the slide in pixels")
    parser.add_argument("--width", type=int, required=True, help="width of the slide in pixels")
    parser.add_argument("--device", type=str, default="cpu", help="whose speed ranks the plans: cpu, cuda")
    parser.add_argument("--json", type=Path, default=None, help="also write the plan to this file")
    parser.add_argument("--picture", type=Path, default=None, help="also draw memory over the step, as PNG")
    options = parse(parser, words)
    model, _, config = instantiate(parser, options)
    if config.budget is None:
        raise UserError("a plan needs a budget: give --train.budget, such as 8GiB")
    found = plan_step(model, options.height, options.width, config.budget, options.device)
    Console(width=160).print(str(found), highlight=False, markup=False)
    if options.json is not None:
        options.json.write_text(found.to_json() + "\n", encoding="utf-8")
    if options.picture is not None:
        found.draw(str(options.picture))
    return 0


def plan_step(model: SlideClassifier, height: int, width: int, budget: str, device: str = "cpu") -> Plan:
    """The plan of a training step on a slide of this size; nothing is allocated."""
    if height < 1 or width < 1:
        raise UserError(f"a slide of {height} × {width} pixels cannot be planned; give --height and --width above 0")
    model.train()
    model.standardise.eval()  # it would write the statistics of a slide that is not there
    return make_plan(model, (1, 3, height, width), budget=budget, device=device, dtype=torch.uint8)
