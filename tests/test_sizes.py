"""No file is too long to be read at once, and nothing is made of more arguments than can be kept in mind."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.test_layers import PACKAGES, files

#: Lines of a file, and arguments of a constructor.
LINES, ARGUMENTS = 400, 8

#: Files that are longer.
LONGER = {
    "wsi_trainer.models.classifier": "a LightningModule, whose hooks belong to one class",
}

#: What has more arguments. Each is a record whose fields are named where it is made.
RECORDS = {
    # what users say, an entry each
    "lightning_plugin.options.Options": "the options",
    "wsi_trainer.data.datamodule.DataConfig": "a section of a config",
    "wsi_trainer.data.patches.config.PatchConfig": "a section of a config",
    "wsi_trainer.explain.options.MapOptions": "options of a command",
    "wsi_trainer.fit.config.TrainConfig": "a section of a config",
    "wsi_trainer.models.classifier.SlideClassifier": "a section of a config: jsonargparse reads a constructor",
    "wsi_trainer.slides.settings.Settings": "options of a command",
    "wsi_trainer.synthetic.nuclei.Nuclei": "what a synthetic slide is made of",
    "wsi_trainer.synthetic.spec.SlideSpec": "what a synthetic slide is made of",
    # what is written to files or shown, an entry each
    "lightning_plugin.plan_fields.SegmentPlan": "decisions",
    "lightning_plugin.plan_fields.BarePlan": "decisions",
    "lightning_plugin.plan_forecast.Forecast": "figures",
    "lightning_plugin.strategy.report.StepReport": "figures",
    "wsi_trainer.data.manifest.SlideRecord": "a row",
    "wsi_trainer.embed.layouts.Written": "a row",
    "wsi_trainer.fit.status.RunStatus": "what a run says of itself",
    "wsi_trainer.models.encoders.entry.Encoder": "a row of the table of encoders",
    "wsi_trainer.report.rows.SlideRow": "a row",
    "wsi_trainer.slides.convert.Converted": "a row",
    "wsi_trainer.slides.readers.dicom_series.Instance": "a file's header",
    "wsi_trainer.slides.readers.protocol.SlideInfo": "a file's header",
    "wsi_trainer.view.contents.ShownSlide": "a row",
    # figures that belong together
    "lightning_plugin.plan_parts.Part": "a part of a plan, as its table shows it",
    "lightning_plugin.planner.search.partial.Partial": "a partial plan: what a search compares",
    "lightning_plugin.planner.costs.peak.Facts": "what a search asks of a node",
    "lightning_plugin.planner.search.policies.Policy": "a row of the table of policies",
    "lightning_plugin.planner.costs.rates.Rates": "figures of a device",
    "lightning_plugin.planner.search.site.Site": "what a search asks of a place",
    "lightning_plugin.program.tape.Step": "an operator of a tape, unpacked in the loop over tiles",
    "lightning_plugin.rules.attention.Attention": "an operator: how its five maps lie",
    # all that a run, or a step, has in common
    "lightning_plugin.execute.frame.Frame": "of a run",
    "lightning_plugin.execute.step.Step": "of a step",
    "wsi_trainer.embed.slides.Embedder": "of a run",
}


def sources() -> Iterator[tuple[str, str]]:
    """Each module, and what is in its file."""
    for package in PACKAGES:
        for name, path in files(package).items():
            yield name, path.read_text()


def constructors() -> Iterator[tuple[str, int]]:
    """Each class, and of how many arguments it is made."""
    for module, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                yield f"{module}.{node.name}", arguments(node)


def arguments(made: ast.ClassDef) -> int:
    """Of how many arguments a class is made: those of its own constructor, or the fields of a record."""
    for item in made.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return len([*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs]) - 1
    marks = map(ast.unparse, (*made.decorator_list, *made.bases))
    if not any("dataclass" in mark or "NamedTuple" in mark for mark in marks):
        return 0
    return sum(isinstance(item, ast.AnnAssign) and is_argument(item) for item in made.body)


def is_argument(field: ast.AnnAssign) -> bool:
    default = "" if field.value is None else ast.unparse(field.value)
    return "ClassVar" not in ast.unparse(field.annotation) and "init=False" not in default


def test_files_can_be_read_at_once() -> None:
    long = {module for module, text in sources() if text.count("\n") > LINES}
    assert long == LONGER.keys()


def test_constructors_have_few_arguments() -> None:
    many = {name for name, count in constructors() if count > ARGUMENTS}
    assert many == RECORDS.keys()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("class A:\n    def __init__(self, a, /, b, *, c): ...", 3),
        ("@dataclass(frozen=True)\nclass A:\n    a: int\n    b: int = field(init=False)\n    c: ClassVar[int]", 1),
        ("class A(NamedTuple):\n    a: int\n    b: int = 2", 2),
        ("class A:\n    a: int", 0),
    ],
)
def test_arguments_are_counted(text: str, count: int) -> None:
    (made,) = ast.parse(text).body
    assert isinstance(made, ast.ClassDef)
    assert arguments(made) == count
