"""Chromium for tests: from a package of npm, without root and without a download of its own.

python -m tests.e2e.console.chromium        # unpacks Chromium into .browser/; make setup does it
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cdk import NODE
from cdk.tool.npm import install_locked

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HERE = Path(__file__).resolve().parent
BROWSER = HERE.parents[2] / ".browser"
PACKAGES = BROWSER / "packages"
PROGRAM = BROWSER / "chromium"
AXE = BROWSER / "node_modules" / "axe-core" / "axe.min.js"
# Tests import playwright.
sys.path.append(str(PACKAGES))
_UNPACK = 'import("@sparticuz/chromium").then((chromium) => chromium.default.executablePath())'
# Without one of these folders Chromium finds no font and ends.
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>{fonts}</dir>
  <dir>/usr/share/fonts</dir>
  <alias><family>system-ui</family><prefer><family>Open Sans</family></prefer></alias>
  <alias><family>ui-monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
  <cachedir>{cache}</cachedir>
</fontconfig>
"""
_ARGUMENTS = ("--headless=shell", "--no-sandbox", "--disable-gpu", "--font-render-hinting=none")


def install() -> None:
    """Install the packages of the lock file and unpack Chromium, its libraries and its fonts into `.browser`."""
    BROWSER.mkdir(exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, BROWSER)
    install_locked(BROWSER)
    # The package unpacks into the folder of temporary files, and its libraries only where it believes to be in Lambda.
    environment = {"TMPDIR": str(BROWSER), "AWS_EXECUTION_ENV": "AWS_Lambda_nodejs24.x", "PATH": ""}
    PROGRAM.unlink(missing_ok=True)
    subprocess.run([str(NODE), "--input-type=module", "-e", _UNPACK], cwd=BROWSER, env=environment, check=True)
    conf = _FONTS.format(fonts=BROWSER / "fonts", cache=BROWSER / "font-cache")
    (BROWSER / "fonts" / "fonts.conf").write_text(conf, encoding="utf-8")


@contextmanager
def launched() -> Iterator[Browser]:
    """Run Chromium. Fails, and names the remedy, if `make setup-tests` has not installed the browser."""
    assert PROGRAM.exists() and PACKAGES.exists(), f"{BROWSER} is incomplete: run `make setup-tests`"
    from playwright.sync_api import sync_playwright

    environment = {
        "LD_LIBRARY_PATH": str(BROWSER / "al2023" / "lib"),
        "FONTCONFIG_PATH": str(BROWSER / "fonts"),
        "HOME": str(BROWSER),
        "TZ": "Europe/Berlin",
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=list(_ARGUMENTS), env=environment)
        try:
            yield browser
        finally:
            browser.close()


if __name__ == "__main__":
    install()
