"""OpenSeadragon is the file that was chosen, with its notices.

`npm pack openseadragon@VERSION` has the script as `build/openseadragon/openseadragon.min.js`; the notices are its
`LICENSE.txt` and those that `openseadragon.js` has in comments.
"""

import hashlib

import pytest

from wsi_trainer.view.server import ASSETS, asset

VERSION = "6.1.1"
SHA256 = {
    "openseadragon.min.js": "14d587cd3ee7c4861f1a41077ce642029364a21029956ba635bd8fb1202cf9ad",
    "openseadragon-license.txt": "a4801fd595dffd7928ac1394959983ea17cb0191230e8ed90858cf4f4c12c88b",
}


@pytest.mark.parametrize("name", SHA256)
def test_the_files_are_those_of_the_package(name: str) -> None:
    assert name in ASSETS and hashlib.sha256(asset(name)).hexdigest() == SHA256[name]


def test_the_script_names_its_version_and_the_notices_are_there() -> None:
    assert f"openseadragon {VERSION}".encode() in asset("openseadragon.min.js")[:200]
    notices = asset("openseadragon-license.txt").decode()
    for owner in ("OpenSeadragon contributors", "John Resig", "Matt Snider"):
        assert owner in notices
    assert "Redistributions of source code must retain the above copyright" in notices
