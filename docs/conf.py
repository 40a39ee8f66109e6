"""How Sphinx builds the documentation. The reference is made from the code each time: see `reference.py`."""

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from reference import write_notebooks, write_reference  # noqa: E402

from wsi_trainer import __version__  # noqa: E402

project = "wsi-trainer"
author = "The wsi-trainer contributors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["figures", "site"]

html_theme = "furo"
html_title = "wsi-trainer"
html_static_path = ["style"]
html_css_files = ["width.css"]
html_show_copyright = False
# Outputs are shown as `text`, and have nothing to be copied.
copybutton_selector = ", ".join(f"div.highlight-{language} pre" for language in ("sh", "python", "yaml", "powershell"))

# Headings of a Markdown page can be linked to, and ```{directive}``` fences may be written with colons.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# Docstrings write `name` for code, as Markdown does.
default_role = "code"
# What torch and Lightning say about their own methods is in their documentation.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
maximum_signature_line_length = 100
# A public name is documented where it is defined and where it is exported; a short reference may mean either.
suppress_warnings = ["ref.python"]


def setup(app: Sphinx) -> None:
    """Write the pages that are made, of the reference and of notebooks, before Sphinx looks for pages."""
    app.connect("builder-inited", lambda built: write_reference(HERE / "reference"))
    app.connect("builder-inited", lambda built: write_notebooks(HERE / "notebooks"))
    app.connect("doctree-read", keep_units)
    app.connect("autodoc-process-docstring", separate_plurals)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before Napoleon, which has 500


def keep_units(app: Sphinx, page: nodes.document) -> None:
    """Keep a number and its unit on one line, as in 1.7 GiB."""
    for text in list(page.findall(nodes.Text)):
        kept = re.sub(r"(?<=\d) (?=([KMGT]i)?B\b|(ms|s|min|h|M|px|µm|%)(?!\w))", "\N{NO-BREAK SPACE}", text)
        if kept != text and not isinstance(text.parent, nodes.literal | nodes.literal_block):
            text.parent.replace(text, nodes.Text(kept))


def separate_plurals(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Let a letter follow code, as in `Slot`s, which reStructuredText takes only after an escaped space."""
    lines[:] = [re.sub(r"(?<!`)(`[^`]+`)(?=\w)", r"\1\\ ", line) for line in lines]


def keep_colons(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keep Napoleon from taking the words before a colon, in the first line about an attribute, for its type."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "\\")  # an empty line of text to reStructuredText
