"""Nothing unsafe, as a system: who may open a file, parse, run something or write text, and why.

Files of others come in through `wsi_trainer.foreign` and a few readers; text of others goes out through one module for
each format. Every other call of the kinds below is an error here, unless a line of `ALLOWED` says why it is safe. A
line that nothing needs any more is an error too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lightning_plugin", "wsi_trainer")

#: Kinds of calls, and the names that are of a kind: whole, or after the last point where they begin with one.
KINDS: Mapping[str, frozenset[str]] = {
    "opens": frozenset({
        "open", ".open", "os.open", "os.fdopen", "io.open", ".read_text", ".read_bytes", "np.fromfile", "np.memmap",
        "mmap.mmap", "tarfile.open", "zipfile.ZipFile", "shutil.unpack_archive", "sqlite3.connect",
    }),
    "parses": frozenset({
        "json.load", "json.loads", "yaml.load", "yaml.safe_load", "yaml.unsafe_load", "yaml.full_load",
        "yaml.load_all", "yaml.parse", "yaml.compose", "csv.reader", "csv.DictReader", "expat.ParserCreate",
        "ElementTree.parse", "ElementTree.fromstring", "ElementTree.XML", "ElementTree.iterparse", "minidom.parse",
        "minidom.parseString", "configparser.ConfigParser", "tomllib.load", "tomllib.loads", "tifffile.TiffFile",
        "tifffile.imread", "Image.open", "zarr.open", "zarr.open_group", "zarr.open_array", "zarr.group",
        "h5py.File", ".File", "pydicom.dcmread", "WsiDicom.open", "openslide.OpenSlide", "np.load", "np.loadtxt",
        "np.genfromtxt", "torch.load", "safetensors.torch.load_file", "load_file", "imagecodecs.png_decode",
    }),
    "runs": frozenset({
        "eval", "exec", "compile", "__import__", "importlib.import_module", "runpy.run_path", "runpy.run_module",
        "os.system", "os.popen", "os.execv", "os.execvp", "os.execve", "os.spawnv", "os.startfile",
        "subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call", "subprocess.check_output",
        "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open", "dill.loads",
        "joblib.load", "cloudpickle.loads", "torch.hub.load", "webbrowser.open",
    }),
    "writes text": frozenset({
        "csv.writer", "csv.DictWriter", "Environment", "jinja2.Environment", "Template", "jinja2.Template", "Markup",
        "print", "sys.stdout.write", "sys.stderr.write", "logging.Formatter", "logging.StreamHandler",
        "logging.FileHandler", ".print", ".write_text",
    }),
}  # fmt: skip

#: Modules that may make calls of a kind, and why that is safe. A folder ends with a point.
ALLOWED: Mapping[str, Mapping[str, str]] = {
    "opens": {
        "wsi_trainer.foreign.": "the door",
        "wsi_trainer.slides.readers.tiff": "a slide, read box by box; the registry has refused pipes and devices",
        "wsi_trainer.slides.readers.ndpi": "a slide that OpenSlide has opened: the sizes of its pages",
        "wsi_trainer.slides.readers.registry": "the first bytes of what is a regular file",
        "wsi_trainer.slides.readers.picture": "a slide whose pixels were counted",
        "wsi_trainer.slides.readers.dicom": "WsiDicom on files of a checked series",
        "wsi_trainer.slides.readers.dicom_series": "the header of a regular file, and a bounded table of its frames",
        "wsi_trainer.slides.readers.inner_size": "a tile in memory, of which only the header is read",
        "wsi_trainer.slides.identity": "hashes of bytes that nobody interprets",
        "wsi_trainer.slides.walk": "16 bytes of a regular file",
        "wsi_trainer.slides.store.": "chunks of a store with checksums, read at places its index was checked for",
        "wsi_trainer.slides.stall": "what the kernel says of our own processes",
        "wsi_trainer.places.geojson": "writes",
        "wsi_trainer.tables": "writes",
        "wsi_trainer.models.weights": "checksums of the parts of an archive, which are not unpacked to files",
        "wsi_trainer.cli.entry": "the null device; a traceback of ours",
        "wsi_trainer.embed.layouts": "its own file, to have it on the disk",
        "wsi_trainer.embed.partial": "its own rows, whose number is counted from the file's length",
        "wsi_trainer.explain.qupath": "a script of the package",
        "wsi_trainer.report.render": "a picture of its own, just drawn",
        "wsi_trainer.fit.cost": "what the kernel says of energy",
        "wsi_trainer.view.pages": "files of the package",
        "wsi_trainer.view.vendored": "for developers: a package with a known hash",
        "wsi_trainer.view.command": "opens the browser at its own link",
        "lightning_plugin.planner.cache": "the door of the engine's cache, with a limit",
        "lightning_plugin.planner.calibration.calibrate": "what the kernel says of the processor",
        "lightning_plugin.planner.recipes.shelf": "its own source code, to be hashed",
        "lightning_plugin.heap": "what the kernel says of our memory",
        "lightning_plugin.memory": "what the kernel says of our limits",
        "lightning_plugin.strategy.writing": "writes",
        "lightning_plugin.planner.search.interval": "a number of bytes, not a file",
        "lightning_plugin.planner.costs.peak": "a number of bytes, not a file",
        "wsi_trainer.regions.labels": "a TIFF that is open, of which sizes are checked",
        "wsi_trainer.fit.events": "its own log, to append to",
        "wsi_trainer.fit.bundle": "writes a zip",
        "lightning_plugin.residency.mapped": "its own parameters, in a file without a name",
    },
    "parses": {
        "wsi_trainer.foreign.": "the door",
        "wsi_trainer.tables": "the door for tables",
        "wsi_trainer.models.weights": "the door for weights: tensors and plain values only",
        "wsi_trainer.slides.readers.": "the readers of slides, behind the registry",
        "wsi_trainer.regions.labels": "label images, of which sizes and codecs are checked",
        "wsi_trainer.explain.dicom.slide": "the header of a slide that was opened as one",
        "wsi_trainer.explain.layer": "writes a store",
        "wsi_trainer.slides.export": "writes a store",
        "wsi_trainer.embed.layouts": "writes a file",
        "wsi_trainer.slides.store.journal": "its own header, made JSON and back",
        "wsi_trainer.doctor.formats": "files that it has just written",
        "lightning_plugin.plan_json": "the door for plans: each field is checked against its type",
        "lightning_plugin.planner.calibration.calibrate": "the engine's cache, each rate checked",
        "lightning_plugin.planner.recipes.shelf": "the engine's cache, behind a checksum",
    },
    "runs": {
        "wsi_trainer.cli.entry": "imports a command of the package's own table",
        "wsi_trainer.cli.choices": "imports a class that the package's own table names",
        "wsi_trainer.slides.readers.registry": "imports a reader of the package",
        "wsi_trainer.models.backbones.named": "imports torchvision or timm, from a table of the package",
        "wsi_trainer.fit.plan_model": "`plan --model` names it on the command line: it is the user's own code",
        "wsi_trainer.fit.cross_validation": "runs this program itself for each fold, without a shell",
        "wsi_trainer.view.vendored": "for developers: npm, without a shell",
        "wsi_trainer.view.command": "opens the browser at its own link",
        "lightning_plugin.strategy.": "imports one of the two packages of Lightning, from a table",
    },
    "writes text": {
        "wsi_trainer.tables": "the door for CSV",
        "wsi_trainer.pages": "the door for HTML",
        "wsi_trainer.terminal": "the door for the terminal",
        "wsi_trainer.fit.quiet": "a log whose lines the door for logs writes",
        "wsi_trainer.report.render": "a page of the door for HTML",
        "wsi_trainer.cli.entry": "one line, cleaned; help of its own",
        "wsi_trainer.stopping": "one line of its own",
        "wsi_trainer.slides.recipes": "one line, cleaned; counts",
        "wsi_trainer.slides.results": "a table of cleaned cells",
        "wsi_trainer.doctor.command": "what is known of this machine; JSON",
        "wsi_trainer.doctor.encoders": "a table of cleaned cells",
        "wsi_trainer.demo.command": "words of its own",
        "wsi_trainer.demo.stages": "its own config",
        "wsi_trainer.demo.summary": "a table of its own slides",
        "wsi_trainer.fit.compare": "a table of cleaned cells",
        "wsi_trainer.fit.cross_validation": "a table of cleaned cells; configs, which the parser writes",
        "wsi_trainer.fit.plan_command": "a plan, which holds names of the user's own modules; JSON",
        "wsi_trainer.fit.run_folder": "JSON",
        "wsi_trainer.fit.status_command": "JSON",
        "wsi_trainer.explain.qupath": "a script of the package with one path, quoted",
        "wsi_trainer.synthetic.generate": "JSON of its own",
        "wsi_trainer.view.vendored": "for developers: a licence",
        "lightning_plugin.strategy.feedback": "plans, which hold names of the user's own modules; a console of its own",
    },
}


def name_of(call: ast.Call) -> str:
    """The function of a call, as it is written; what it is called on is left out where that is no plain name."""
    return re.sub(r"^.*[)\]]\.", ".", ast.unparse(call.func), flags=re.DOTALL)


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def calls(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, kind and name of all calls that are of a kind."""
    aliases: dict[str, str] = {}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            aliases.update({alias.asname: alias.name for alias in node.names if alias.asname})
    for node in nodes(path):
        if isinstance(node, ast.Call):
            written = name_of(node)
            head, point, rest = written.partition(".")
            full = aliases.get(head, head) + point + rest
            if full.startswith("wsi_trainer."):
                continue  # a door, or what is looked at where it stands
            spelled = {written, full, full.replace("numpy.", "np."), ".".join(full.split(".")[-2:])}
            last = {f".{name.rpartition('.')[2]}" for name in spelled if "." in name}
            for kind, names in KINDS.items():
                if names & (spelled | last):
                    yield node.lineno, kind, written


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def allows(entry: str, module: str) -> bool:
    return module == entry or (entry.endswith(".") and module.startswith(entry))


SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FOUND = [(module_of(path), *call) for path in SOURCES for call in calls(path)]


def test_only_the_doors_open_parse_run_and_write() -> None:
    others = [
        f"{module}, line {line}: {name} {kind}"
        for module, line, kind, name in FOUND
        if not any(allows(entry, module) for entry in ALLOWED[kind])
    ]
    assert not others, "go through wsi_trainer.foreign (or tables, pages, terminal, words), or say here why it is safe"


def test_no_exception_is_left_over() -> None:
    idle = [
        f"{entry} {kind}"
        for kind, entries in ALLOWED.items()
        for entry in entries
        if not any(allows(entry, module) and kind == of for module, _, of, _ in FOUND)
    ]
    assert not idle


def test_nothing_is_unpickled() -> None:
    """PyTorch's weights are pickles, and NumPy's arrays may be: both are asked for plain values only."""
    asked = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
    seen = set()
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and (name := name_of(node)) in asked:
                key, value = asked[name]
                said = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
                assert said.get(key) is value, f"{path}, line {node.lineno}: {name} without {key}={value}"
                seen.add(name)
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
                kept = module_of(path) in ("wsi_trainer.models.weights",)  # it catches pickle's errors
                assert kept or not {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"} & set(names), path
    assert seen == set(asked), "both are used, or this test sees nothing"


def test_no_shell_is_started() -> None:
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Call):
                assert not [k for k in node.keywords if k.arg == "shell"], f"{path}, line {node.lineno}"


def test_templates_escape() -> None:
    """What is put into a page is escaped by the environment, and no template turns that off."""
    templates = list((ROOT / "wsi_trainer").rglob("*.j2"))
    assert templates
    for path in templates:
        text = path.read_text()
        assert not re.search(r"\|\s*(safe|tojson)\b|autoescape|Markup", text), path
    pages = (ROOT / "wsi_trainer" / "pages.py").read_text()
    assert "autoescape=True" in pages


def test_scripts_of_the_viewer_make_no_html_of_text() -> None:
    for path in (ROOT / "wsi_trainer" / "view" / "assets").glob("*.js"):
        if "openseadragon" not in path.name:
            text = path.read_text()
            found = re.search(
                r"innerHTML\s*=|outerHTML\s*=|insertAdjacentHTML|document\.write|\beval\(|new Function", text
            )
            assert not found, (path, found)


def test_text_beside_html_is_not_put_into_it_by_hand() -> None:
    """A formatted string with a tag in it is a page made by hand."""
    tag = re.compile(r"</?(a|b|p|td|tr|div|span|li|script|html|body|img|h[1-6])( [a-z-]+=[^>]*)?/?>", re.IGNORECASE)
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.JoinedStr) and any(isinstance(part, ast.FormattedValue) for part in node.values):
                text = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
                assert not tag.search(text), f"{path}, line {node.lineno}"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("import json\njson.loads(x)", "parses"),
        ("from json import loads\nloads(x)", "parses"),
        ("import json as j\nj.loads(x)", "parses"),
        ("from pathlib import Path\nPath(x).read_text()", "opens"),
        ("(a / b).open('rb')", "opens"),
        ("open(x)", "opens"),
        ("import numpy\nnumpy.load(x)", "parses"),
        ("from torch import load\nload(x)", "parses"),
        ("import xml.etree.ElementTree as E\nE.parse(x)", "parses"),
        ("eval(x)", "runs"),
        ("import subprocess as s\ns.run(x)", "runs"),
        ("from os import system\nsystem(x)", "runs"),
        ("import pickle\npickle.loads(x)", "runs"),
        ("import csv\ncsv.writer(x)", "writes text"),
        ("print(x)", "writes text"),
    ],
)
def test_the_rule_sees_every_spelling(tmp_path: Path, text: str, kind: str) -> None:
    path = tmp_path / "some.py"
    path.write_text(text)
    assert kind in {found for _, found, _ in calls(path)}
