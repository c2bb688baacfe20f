"""Build of the console: `src` becomes `dist`, which the API serves; equal inputs give equal bytes.

    python -m console.build

npm installs the packages of the lock file, and esbuild bundles them with the sources. A module that the sources load
with `import()` becomes a script of its own, which the first view does not read. The name of each script and style sheet
contains a digest of the contents, so a browser may keep the file for ever. `manifest.json` lists the files:
`{"files": {"main-5TQ7A2.js": {"content_type": "text/javascript; charset=utf-8", "bytes": 9120, "gzip_bytes": 3311}}}`.
Beside each file `<name>.gz` has its compressed bytes.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cdk import NODE
from cdk.tool.npm import NpmError, install_locked

CONSOLE = Path(__file__).resolve().parent
SOURCES = CONSOLE / "src"
DIST = CONSOLE / "dist"
PACKAGES = CONSOLE / "node_modules"
INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
OPTIONS = (
    "--bundle",
    "--minify",
    "--format=esm",
    "--splitting",
    "--target=es2022",
    "--entry-names=[name]-[hash]",
    "--chunk-names=[name]-[hash]",
    "--log-level=warning",
)


class ConsoleBuildError(Exception):
    """The console could not be built; the message is the reason of npm or esbuild."""


def main() -> int:
    """Build into `dist`; return the exit status."""
    try:
        build(DIST)
    except ConsoleBuildError as error:
        sys.stderr.write(f"console: {error}\n")
        return 1
    return 0


def build(dist: Path) -> None:
    """Write the console's files into `dist`, in place of earlier ones. Raises ConsoleBuildError."""
    _install()
    with tempfile.TemporaryDirectory(prefix=".dist-", dir=dist.parent) as made:
        output = Path(made) / "dist"
        _bundle(output)
        _write_index(output)
        _write_manifest(output)
        shutil.rmtree(dist, ignore_errors=True)
        output.rename(dist)


def _install() -> None:
    """Install the packages, unless those of this lock file are there."""
    lock, installed = CONSOLE / "package-lock.json", PACKAGES / ".package-lock.json"
    if installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime:
        return
    try:
        install_locked(CONSOLE)
    except NpmError as error:
        raise ConsoleBuildError(f"npm cannot install the packages of {lock}: {error}") from error
    installed.touch()


def _bundle(output: Path) -> None:
    entries = [str(SOURCES / "main.js"), str(SOURCES / "style" / "main.css")]
    # Without a common base esbuild would put the style sheet into a folder.
    # The program is native, or a script that needs `node`, as the package could install it.
    path = os.pathsep.join([str(NODE.parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [str(PACKAGES / ".bin" / "esbuild"), *entries, *OPTIONS, f"--outdir={output}"],
        cwd=CONSOLE,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConsoleBuildError(f"esbuild cannot bundle {SOURCES}:\n{done.stderr.strip()}")


def _write_index(output: Path) -> None:
    page = (SOURCES / INDEX).read_text(encoding="utf-8")
    for mark, pattern in (("%SCRIPT%", "main-*.js"), ("%STYLE%", "main-*.css")):
        (file,) = output.glob(pattern)
        page = page.replace(mark, f"/console/{file.name}")
    (output / INDEX).write_text(page, encoding="utf-8")


def _write_manifest(output: Path) -> None:
    files = {}
    for path in sorted(output.iterdir()):
        content = path.read_bytes()
        # Without the time of day, which would change the bytes.
        compressed = gzip.compress(content, mtime=0)
        path.with_name(f"{path.name}.gz").write_bytes(compressed)
        files[path.name] = {
            "content_type": CONTENT_TYPES[path.suffix],
            "bytes": len(content),
            "gzip_bytes": len(compressed),
        }
    (output / "manifest.json").write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
