"""OpenSeadragon, which lies among the files of the page: one script, and the notices of its licences.

`python -m tests.wsi_trainer.view.vendored` fetches it with npm, compares the package with the hash below, and writes
both files. Nothing else needs Node.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from wsi_trainer.errors import UserError

ASSETS = Path(__file__).resolve().parents[3] / "wsi_trainer" / "view" / "assets"
VERSION = "6.1.1"
INTEGRITY = "sha512-g4iKe2q8B642SaBT3+x4ZF3/8b1TxPPydyjmtrOLgDrlYWMKd9ZXM+1Cb/xa9DVySkvs/7l6HR1nHKfD5F3Tsw=="
"""Of the npm package, as npm itself states it."""
SHA256 = {
    "openseadragon.min.js": "14d587cd3ee7c4861f1a41077ce642029364a21029956ba635bd8fb1202cf9ad",
    "openseadragon-license.txt": "a4801fd595dffd7928ac1394959983ea17cb0191230e8ed90858cf4f4c12c88b",
}

_SCRIPT = "package/build/openseadragon/openseadragon.min.js"
_SOURCE = "package/build/openseadragon/openseadragon.js"
_LICENCE = "package/LICENSE.txt"
_NOTICE = re.compile(r"/\*(?:(?!\*/).)*?\bCopyright\b.*?\*/", re.DOTALL)


def fetch() -> None:
    """Write both files from the package of npm."""
    with TemporaryDirectory() as scratch:
        command = ["npm", "pack", "--silent", f"openseadragon@{VERSION}"]
        subprocess.run(command, cwd=scratch, check=True, capture_output=True)
        package = Path(scratch) / f"openseadragon-{VERSION}.tgz"
        check(package.read_bytes())
        with tarfile.open(package) as archive:
            script, source, licence = (_member(archive, name) for name in (_SCRIPT, _SOURCE, _LICENCE))
    (ASSETS / "openseadragon.min.js").write_bytes(script)
    (ASSETS / "openseadragon-license.txt").write_text(notices(licence.decode(), source.decode()), encoding="utf-8")
    for name, digest in SHA256.items():
        found = hashlib.sha256((ASSETS / name).read_bytes()).hexdigest()
        if found != digest:
            raise UserError(
                f"{ASSETS / name} has the SHA-256 {found}, not {digest}; correct {__file__} if that is meant"
            )


def check(package: bytes) -> None:
    """Refuse a package that is not the one that was chosen."""
    found = "sha512-" + base64.b64encode(hashlib.sha512(package).digest()).decode()
    if found != INTEGRITY:
        raise UserError(f"the package openseadragon {VERSION} has the hash {found}, not {INTEGRITY}")


def notices(licence: str, source: str) -> str:
    """The licence, and the notices of what others wrote, which the minified script has lost."""
    found = [licence.strip()]
    for notice in _NOTICE.findall(source):
        lines = (re.sub(r"^\s*/?\*+/?\s?", "", line).rstrip() for line in notice.splitlines())
        text = "\n".join(lines).strip()
        if text.startswith("OpenSeadragon") or text in found:  # the licence itself, at the head of each file
            continue
        found.append(text)
    return "\n\n----\n\n".join(found) + "\n"


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise UserError(f"the package openseadragon {VERSION} has no file {name}")
    return file.read()


if __name__ == "__main__":
    fetch()
