"""Test npm behind a company's certificate authority and without a registry."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import ssl
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdk.tool.npm import NpmError, install_locked, reason_in
from tests.kits.network.certificates import throwaway_certificate
from tests.kits.network.http_server import HttpServer, QuietHandler

ROOT = Path(__file__).parents[2]


def package() -> bytes:
    """Return the package hello@1.0.0 as npm's registry serves it."""
    content = json.dumps({"name": "hello", "version": "1.0.0"}).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        member = tarfile.TarInfo("package/package.json")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


PACKAGE = package()
INTEGRITY = "sha512-" + base64.b64encode(hashlib.sha512(PACKAGE).digest()).decode()


class Registry(QuietHandler):
    """Serve hello@1.0.0."""

    def do_GET(self) -> None:
        url = f"https://{self.headers['host']}/hello-1.0.0.tgz"
        version = {"name": "hello", "version": "1.0.0", "dist": {"tarball": url, "integrity": INTEGRITY}}
        described = {"name": "hello", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
        body = PACKAGE if self.path.endswith(".tgz") else json.dumps(described).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """Create a private certificate authority and a certificate for 127.0.0.1."""
    return throwaway_certificate(tmp_path / "authority.pem")


@pytest.fixture
def registry(authority: Path) -> Iterator[str]:
    """Serve a registry over TLS; yield its URL."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority)
    with HttpServer(Registry, tls=context) as server:
        yield server.url


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: str) -> Path:
    """Create a project with hello@1.0.0 in its lock file, without other settings of npm and certificates."""
    for name in ("NODE_EXTRA_CA_CERTS", "NODE_OPTIONS", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"registry": registry, "cache": tmp_path / "cache", "userconfig": tmp_path / "npmrc"}.items():
        monkeypatch.setenv(f"npm_config_{name}", str(value))
    directory = tmp_path / "project"
    directory.mkdir()
    described = {"name": "project", "dependencies": {"hello": "1.0.0"}}
    locked = {"version": "1.0.0", "integrity": INTEGRITY}
    lock = {"name": "project", "lockfileVersion": 3, "packages": {"": described, "node_modules/hello": locked}}
    (directory / "package.json").write_text(json.dumps(described))
    (directory / "package-lock.json").write_text(json.dumps(lock))
    return directory


def test_npm_takes_the_certificate_authorities_that_the_system_has(
    project: Path, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of its own, since the import of `cdk` has set the variable of Node for this one."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    monkeypatch.delenv("NODE_USE_SYSTEM_CA", raising=False)
    program = "import pathlib, sys, cdk.tool.npm; cdk.tool.npm.install_locked(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, project], cwd=ROOT, timeout=240, check=True)
    assert json.loads((project / "node_modules/hello/package.json").read_text())["version"] == "1.0.0"


def test_an_unknown_certificate_authority_is_said_in_one_line_within_seconds(project: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(NpmError, match=r"hello failed, reason: .*certificate.*SSL_CERT_FILE") as refused:
        install_locked(project)
    assert "\n" not in str(refused.value)
    # npm's own repetitions take 70 s.
    assert time.monotonic() - began_s < 60
    assert not (project / "node_modules").exists()


def test_npm_that_says_nothing_is_said() -> None:
    assert reason_in("") == "npm gave no reason"
    assert reason_in("npm error code ENOENT\nnpm error errno -2\n\nnpm error no lock\n") == "no lock"


def test_each_test_that_needs_a_download_fails_at_once_with_the_reason(tmp_path: Path) -> None:
    """The second test does not wait for the registry again."""
    (tmp_path / "test_two.py").write_text(
        textwrap.dedent("""
            import pytest
            from cdk.tool import command_line
            from tests.kits.runner.downloads import cdk_command_line

            def refuse():
                print("asked the registry")
                raise command_line.ToolError("the CDK command line could not be installed from npm: away")

            command_line.install = refuse

            @pytest.mark.parametrize("number", [1, 2])
            def test_needs_it(cdk_command_line, number):
                pass
        """)
    )
    line = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert "2 errors" in done.stdout.splitlines()[-1], done.stdout
    assert done.stdout.count("asked the registry") == 1
    assert "\nthe CDK command line could not be installed from npm: away\n" in done.stdout
    assert "Traceback" not in done.stdout
