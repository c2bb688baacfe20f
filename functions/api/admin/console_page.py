"""Serve the console that `python -m console.build` has built: the page, and the files with a digest in their names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

from baton.contract.errors import ErrorCode
from functions.api.http.context import ApiCall, Context, WithHeaders
from functions.domain.errors import Refusal

DIST = Path(__file__).resolve().parents[3] / "console" / "dist"
PAGE = "index.html"
YEAR_S = 365 * 86_400


@dataclass(frozen=True)
class ConsoleFile:
    """File of the console. The ETag is weak, because the compressed and the plain bytes share it."""

    content_type: str
    plain: bytes
    compressed: bytes
    etag: str


def show_root(context: Context, call: ApiCall) -> WithHeaders:
    """Lead from the address of the control plane to the console."""
    return WithHeaders(b"", {"location": "/console"})


def show_page(context: Context, call: ApiCall) -> WithHeaders:
    """Answer with the page of the console."""
    policy = {"cache-control": "no-cache", "content-security-policy": describe_policy(context)}
    return _serve(call, _read_files()[PAGE], policy)


def show_file(context: Context, call: ApiCall) -> WithHeaders:
    """Answer with a script or a style sheet of the console, which browsers keep for a year."""
    name = call.path["file"]
    file = _read_files().get(name)
    if file is None or name == PAGE:
        detail = f"The build of the console has no file {name[:100]!r}."
        raise Refusal(ErrorCode.NOT_FOUND, detail, field="file", remedy="Load /console again.")
    return _serve(call, file, {"cache-control": f"public, max-age={YEAR_S}, immutable"})


def describe_policy(context: Context) -> str:
    """Return the Content-Security-Policy of the page: this origin, and the object store for pictures and files."""
    settings = context.settings
    endpoint = settings.s3_public_endpoint or settings.s3_endpoint
    if endpoint:
        url = urlsplit(endpoint)
        origins = [f"{url.scheme}://{url.netloc}"]
    else:
        buckets = (settings.data_bucket, settings.checkpoints_bucket)
        hosts = ("s3.amazonaws.com", f"s3.{settings.s3_region}.amazonaws.com")
        origins = [f"https://{bucket}.{host}" for bucket in buckets for host in hosts]
    store = " ".join(origins)
    return "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            f"img-src 'self' blob: data: {store}",
            f"connect-src 'self' {store}",
            "frame-ancestors 'none'",
            "base-uri 'none'",
            "form-action 'self'",
            "require-trusted-types-for 'script'",
        )
    )


def _serve(call: ApiCall, file: ConsoleFile, headers: Mapping[str, str]) -> WithHeaders:
    return WithHeaders(
        file.compressed if call.accepts_gzip else file.plain,
        {
            "content-type": file.content_type,
            "etag": file.etag,
            "vary": "accept-encoding",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            **headers,
            **({"content-encoding": "gzip"} if call.accepts_gzip else {}),
        },
    )


def _read_files() -> Mapping[str, ConsoleFile]:
    manifest = DIST / "manifest.json"
    try:
        return _load(manifest, manifest.stat().st_mtime_ns)
    except FileNotFoundError:
        raise Refusal(ErrorCode.CONSOLE_NOT_BUILT) from None


@lru_cache(maxsize=1)
def _load(manifest: Path, _written_ns: int) -> Mapping[str, ConsoleFile]:
    """Read the files of a build once; another build has another time of writing. Raises FileNotFoundError."""
    found = {}
    for name, described in json.loads(manifest.read_text(encoding="utf-8"))["files"].items():
        plain, compressed = (manifest.with_name(file).read_bytes() for file in (name, f"{name}.gz"))
        etag = f'W/"{sha256(plain).hexdigest()[:32]}"'
        found[name] = ConsoleFile(described["content_type"], plain, compressed, etag)
    return found
