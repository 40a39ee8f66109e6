"""OpenSeadragon is the file that was chosen, with its notices."""

import hashlib

import pytest

from tests.wsi_trainer.view import vendored
from wsi_trainer.errors import UserError
from wsi_trainer.view.server import ASSETS


@pytest.mark.parametrize("name", list(vendored.SHA256))
def test_the_files_are_those_of_the_package(name: str) -> None:
    content = (vendored.ASSETS / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == vendored.SHA256[name]


def test_the_script_names_its_version_and_the_notices_are_there() -> None:
    assert f"openseadragon {vendored.VERSION}" in (vendored.ASSETS / "openseadragon.min.js").read_text()[:200]
    notices = (vendored.ASSETS / "openseadragon-license.txt").read_text()
    for owner in ("OpenSeadragon contributors", "John Resig", "Matt Snider"):
        assert owner in notices
    assert "Redistributions of source code must retain the above copyright" in notices


def test_another_package_is_refused() -> None:
    with pytest.raises(UserError, match="has the hash sha512-"):
        vendored.check(b"something else")


def test_the_table_has_all_files_of_the_page() -> None:
    assert {path.name for path in vendored.ASSETS.iterdir()} == set(ASSETS)


def test_notices_are_found_in_comments() -> None:
    source = "/*\n * Portions of this file:\n * Copyright 2011 Somebody\n * MIT\n */\ncode(); /* no notice */"
    assert vendored.notices("BSD\n", source) == "BSD\n\n----\n\nPortions of this file:\nCopyright 2011 Somebody\nMIT\n"
