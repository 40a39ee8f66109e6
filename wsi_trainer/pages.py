"""The one door for text into HTML: templates of the package, with everything that is put into them escaped."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


def template(package: str, name: str) -> Template:
    """A template that lies in a package; a name that it uses and is not given is an error."""
    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=package.endswith("slides"),
    )
    return environment.get_template(name)
