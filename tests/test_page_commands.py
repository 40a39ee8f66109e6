"""Every command, config and link of README and docs: parsed by the program itself, or left out for a reason."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import yaml

from wsi_trainer.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if not {"reference", "notebooks"} & set(path.relative_to(ROOT).parts)  # made from the code, and from notebooks
)
#: Commands that no test runs, by their first word.
NOT_RUN = {
    "make": "a target of the Makefile, which is looked for there; CI runs lint, test and docs",
    "pip": "installs from the network; test_transcript does it with --full",
    "python3": "makes an environment",
    ".venv/bin/python": "runs pip in it",
    ".": "activates an environment",
    "ssh": "needs another machine",
    "napari": "is another program, with a window",
    "sudo": "installs packages of the system, in WSL",
    "explorer.exe": "is a program of Windows, which WSL can start",
    "export": "sets a variable of a job",
    "python": "of a script the file is looked for; `-c` makes slides, as test_tutorial does",
}
#: Programs of this repository; the files are looked for.
SCRIPT = re.compile(r"python (?:-m )?([\w/.]+)")


pytestmark = pytest.mark.usefixtures("documented_once", "planned_once")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget the module that a page has its reader save as `mine.py`: other tests have others of that name."""
    sys.modules.pop("mine", None)
    yield
    sys.modules.pop("mine", None)


class Parsed(BaseException):
    """A command line was understood: nothing is run."""


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks, one for each command, without comments."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    found = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [part.strip() for line in found for part in line.split("&&") if part.strip()]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands of pages name: configs, a run, and the files that pages have a reader save."""
    folder = tmp_path_factory.mktemp("study")

    with zipfile.ZipFile(ROOT / "tests" / "data" / "0.x" / "files.zip") as files:
        files.extractall(folder)
    for run in ("first", "regions", "mine/run", "mine/frozen"):
        shutil.copytree(folder / "run", folder / "runs" / run)
    tutorials = ROOT / "docs" / "tutorial"
    (folder / "my.yaml").write_text(blocks(tutorials / "slides-to-report.md", "yaml")[0])
    for name, config in zip(("study", "survival"), blocks(tutorials / "two-hospitals.md", "yaml"), strict=True):
        (folder / f"{name}.yaml").write_text(config)
    (folder / "mine.yaml").write_text(blocks(tutorials / "fine-tune-an-encoder.md", "yaml")[0])
    (folder / "mine.py").write_text(blocks(ROOT / "docs" / "how-to" / "own-head.md", "python")[0])
    shutil.copy(folder / "manifest.csv", folder / "external.csv")
    return folder


@pytest.fixture
def only_parsed(study: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parsers that end a command as soon as they have understood it."""
    parse = jsonargparse.ArgumentParser.parse_args

    def parse_only(self: jsonargparse.ArgumentParser, *args: Any, **options: Any) -> None:
        parse(self, *args, **options)
        raise Parsed

    monkeypatch.setattr(jsonargparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.chdir(study)
    monkeypatch.syspath_prepend(study)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    return study


def understood(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Why a command line is not understood, or nothing."""
    try:
        code = main(words)
    except Parsed:
        return ""
    return "" if code == 0 else f"{shlex.join(words)}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_is_understood(
    page: Path, only_parsed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for command in commands(page):
        first, *words = shlex.split(command)
        if first == "wsi-train":
            if "COMMAND" not in words:  # stands for any of them
                words = [word.replace("$SLURM_ARRAY_TASK_ID", "1") for word in words]
                wrong.append(understood(words, capsys))
        elif first == "make":
            target = next(word for word in words if "=" not in word)
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
        elif first == "python" and words[0] != "-c":
            script = SCRIPT.match(command)
            assert script is not None, command
            known = [
                ROOT / script[1],
                ROOT / f"{script[1].replace('.', '/')}",
                ROOT / f"{script[1].replace('.', '/')}.py",
            ]
            assert script[1] in ("train.py", "pip") or any(path.exists() for path in known), command
        else:
            assert first in NOT_RUN, f"{page.name}: {command}: neither a test runs it nor a reason is given"
    assert not [said for said in wrong if said]


def test_every_command_that_a_page_mentions_is_there() -> None:
    known = {command.name for command in COMMANDS} | {"COMMAND"}
    for page in PAGES:
        named = set(re.findall(r"`wsi-train ([\w-]+)", page.read_text(encoding="utf-8")))
        assert {name for name in named if not name.startswith("-")} <= known, page.name


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=lambda page: page.stem)
def test_every_config_of_a_page_is_understood(
    page: Path, only_parsed: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = []
    for block in blocks(page, "yaml"):
        if "lightning_plugin.SFTStrategy" in block:
            continue  # of LightningCLI: tests/lightning_plugin/strategy/test_cli.py
        content = yaml.safe_load(block)
        if "model" not in content:  # a part of the block before it
            content = {"model": content}
        content.setdefault("data", {}).setdefault("manifest", "manifest.csv")
        path = tmp_path / "page.yaml"
        path.write_text(yaml.safe_dump(content))
        trusted = ["--trust"] if "mine." in block else []
        wrong.append(understood(["fit", f"--config={path}", "--out=runs/page", *trusted], capsys))
    assert not [said for said in wrong if said]


#: Names that the code of a page takes from its reader, by the page: statements that make them.
GIVEN = {
    "explain-a-model": (
        "from pathlib import Path; from wsi_trainer.synthetic import *; "
        "write_slide(Path('slide.tif'), SlideSpec(256, 320, seed=1))"
    ),
    "large-models": "from pytorch_lightning import Trainer; import torch; net = torch.nn.Conv2d(3, 4, 3)",
    "plan-a-budget": "import torch; net = torch.nn.Conv2d(3, 4, 3)",
    "convert-many-slides": (
        "from pathlib import Path; from wsi_trainer.cli import main; from wsi_trainer.synthetic import *; "
        "write_slide(Path('NAME.tif'), SlideSpec(1024, 1024, seed=1)); main(['preprocess', 'NAME.tif', 'out'])"
    ),
    "train-with-lightning": (
        "import lightning_fabric, pytorch_lightning as pl, torch; "
        "net = torch.nn.Conv2d(3, 4, 3); fabric = lightning_fabric.Fabric(accelerator='cpu', devices=1)"
    ),
    "use-a-run": (
        "import shutil; from wsi_trainer.cli import main; shutil.copytree('stores/s6.zarr', 'new.svs'); "
        "shutil.copytree('stores/s5.zarr', 'other.svs'); shutil.copytree('runs/first', 'runs/second'); "
        "main(['test', 'runs/first', '--cohort=external.csv', '--data.stores=stores', '--name=external-1']); "
        "shutil.copytree('runs/second', 'runs/five-folds/fold0'); from pathlib import Path; import json; "
        "fold = {'kind': 'folds', 'folders': ['fold0'], 'names': ['fold0'], 'split': 'test'}; "
        "Path('runs/five-folds/study.json').write_text(json.dumps(fold)); "
        "main(['export', 'runs/first', '--out=exported'])"
    ),
}
#: Pages whose code runs elsewhere, or nowhere.
ELSEWHERE = {
    "README": "test_pages.py",
    "add-a-rule": "test_pages.py",
    "add-a-slide-format": "test_pages.py",
    "any-huge-image": "test_pages.py",
    "rules-for-neighbours": "test_pages.py",
    "rules-for-reductions": "test_pages.py",
    "volumes": "test_pages.py",
    "fine-tune-an-encoder": "wsi_trainer/cli/test_tutorial.py",
    "design": "pseudo-code: names of the engine without their arguments",
}
MARKED = re.compile(r"<!-- not run: .+? -->\n+```python\n.*?^```", re.MULTILINE | re.DOTALL)


def programs(page: Path) -> list[str]:
    """The Python of a page that is to run: a block may be left out with `<!-- not run: reason -->` above it."""
    text = MARKED.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if programs(page) and page.stem not in ELSEWHERE], ids=lambda page: page.stem
)
def test_the_code_of_a_page_runs(page: Path, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(study)
    monkeypatch.syspath_prepend(study)
    source = "\n".join([GIVEN.get(page.stem, ""), *programs(page)])
    exec(compile(source, str(page), "exec", dont_inherit=True), {"__name__": page.stem})


NAMED = re.compile(r"`((?:lightning_plugin|wsi_trainer|tests|docs|benchmarks|containers|datasets|recipe)/[\w./*-]+)`")
#: Files that a page has its reader write.
TO_WRITE = {"wsi_trainer/slide/formats/npy.py", "benchmarks/results/NAME.json"}


def test_every_file_that_a_page_names_is_there() -> None:
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        files = {name for name in NAMED.findall(text) if name not in TO_WRITE and not list(ROOT.glob(name.rstrip("/")))}
        wrong += [f"{page.name}: {name}" for name in files | (set(re.findall(r"`(test_\w+\.py)`", text)) - tests)]
    assert not wrong


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub and Sphinx make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def test_every_link_leads_to_something_in_the_repository() -> None:
    wrong = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if "reference" in path.relative_to(ROOT).parts:
                continue  # made when the documentation is built, which fails where a link leads nowhere
            if not path.exists() or (anchor and anchor not in anchors(path)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
    assert not wrong


def test_tables_fit_a_window_of_1280_pixels() -> None:
    """Ten columns of numbers fit, which the pages built with `docs/style/width.css` show; more are cut off."""
    wide = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        for line in re.findall(r"^\|.*\n(?=\|[ :|-]+\|$)", page.read_text(encoding="utf-8"), re.MULTILINE)
        if line.count("|") > 11
    ]
    assert not wide
