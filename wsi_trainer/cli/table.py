"""The subcommands of `wsi-train`, one row each.

How to add a subcommand:

1. Write a function with typed arguments and a docstring with an `Args:` section, in the folder it belongs to,
   e.g. `def verify(store: Path, workers: int = 2) -> int | None` in `wsi_trainer/slides/verify.py`.
   Arguments without a default become positional, the others options; a dataclass becomes a group of options.
   `--config FILE.yaml`, `--print_config` and `--help` come by themselves. Return an exit code, or None for 0.
2. Point its row below at `"module:function"`. The module is imported only when the command is chosen, so
   `wsi-train --help` stays fast and imports no torch; import what is heavy wherever you like.
3. Report what the user can mend with `raise UserError("one line: what, where, the way out")`.
4. A command with a parser of its own (LightningCLI) sets `own_parser=True` and is called as `function(argv)`;
   it turns what its parser raises into a UserError with `explain(parser, error, argv)` of `cli.messages`.
5. Test it with `main([...])`, which returns the exit code.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A row: the subcommand's name, one line of help, and where its function is ("" while not there yet)."""

    name: str
    help: str
    target: str = ""
    own_parser: bool = False


COMMANDS: tuple[Command, ...] = (
    Command(
        "demo",
        "make slides, train on them, and write the report: everything once, in a few minutes",
        "wsi_trainer.demo.command:demo",
    ),
    Command(
        "doctor",
        "what is installed, which device, which readers and codecs work, what is missing",
        "wsi_trainer.doctor.command:doctor",
    ),
    Command(
        "preprocess",
        "convert slides to zarr: checked, resumable, background for free",
        "wsi_trainer.slides.preprocess:preprocess",
    ),
    Command(
        "tissue",
        "find the tissue of slides without converting them: a page of all masks, outlines to edit in QuPath",
        "wsi_trainer.slides.review:tissue",
    ),
    Command(
        "verify",
        "read converted slides again and compare them with their manifest of hashes",
        "wsi_trainer.slides.verify:verify",
    ),
    Command(
        "plan",
        "plan a model at an image size under a memory budget, without a device or an image",
        "wsi_trainer.fit.plan:plan",
        own_parser=True,
    ),
    Command(
        "fit",
        "train a slide classifier end to end",
        "wsi_trainer.fit.fit:fit",
        own_parser=True,
    ),
    Command(
        "status",
        "how far a run is that goes on elsewhere: progress, time left, memory, the last error",
        "wsi_trainer.fit.status:status",
    ),
    Command(
        "embed",
        "write features of patches by an encoder that is not trained, for fit, CLAM, TRIDENT and STAMP",
        "wsi_trainer.embed.command:embed",
        own_parser=True,
    ),
    Command(
        "export",
        "write the encoder that a run has trained as a file of weights, LoRA merged into it",
        "wsi_trainer.fit.evaluate:export",
        own_parser=True,
    ),
    Command(
        "validate",
        "evaluate a checkpoint on the validation split",
        "wsi_trainer.fit.evaluate:validate",
        own_parser=True,
    ),
    Command(
        "test",
        "evaluate a checkpoint on the test split, with confidence intervals",
        "wsi_trainer.fit.evaluate:test",
        own_parser=True,
    ),
    Command(
        "predict",
        "write a prediction for each slide",
        "wsi_trainer.fit.evaluate:predict",
        own_parser=True,
    ),
    Command(
        "segment",
        "write the predicted class of each pixel of whole slides, for models trained on drawn regions",
        "wsi_trainer.segment.command:segment",
        own_parser=True,
    ),
    Command(
        "heatmap",
        "write exact whole-slide maps of what the model looked at",
        "wsi_trainer.explain.command:heatmap",
        own_parser=True,
    ),
    Command(
        "report",
        "write the HTML report of a run",
        "wsi_trainer.report.command:report",
    ),
    Command(
        "view",
        "look at slides, maps and predictions in a browser",
        "wsi_trainer.view.command:view",
    ),
)
