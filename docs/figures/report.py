"""Takes docs/figures/report.png of the demo's report: `make demo`, then `.venv/bin/python docs/figures/report.py`.

Chromium has to be there: `playwright install chromium`, or a browser's path in CHROMIUM.
"""

import os
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Open the report and keep what its first screen shows."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM"))
        page = browser.new_page(viewport={"width": 1200, "height": 760})
        page.goto((ROOT / "demo-run" / "report.html").as_uri())
        page.screenshot(path=ROOT / "docs" / "figures" / "report.png")
        browser.close()


if __name__ == "__main__":
    main()
