"""List and link the files of a data set on the Hugging Face Hub.

The token goes to the Hub's own origin only. Large files lie on other hosts, to which the Hub redirects with a signed
URL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http.client import HTTPMessage
from pathlib import Path
from urllib.parse import quote, urljoin, urlsplit

from pydantic import BaseModel, TypeAdapter, ValidationError
from requests.utils import parse_header_links, requote_uri

from baton.contract.objects.dataset_manifest import MAX_DATASET_FILES
from gpu_client.datasets.prefetch.errors import PrefetchCode, PrefetchError
from gpu_client.datasets.prefetch.selection import FileLink, ListedFile
from gpu_client.transport.errors import ObjectMissing, TransferError, UnexpectedAnswer, Unreachable, without_query
from gpu_client.transport.net.cancellation import CancelEvent, Flight, stop_if_set
from gpu_client.transport.net.connections import Connections
from gpu_client.transport.retry import (
    RETRIED_STATUSES,
    Failure,
    GaveUp,
    RetryLater,
    RetryPolicy,
    call_with_retry,
    parse_retry_after,
)

HUB_PREFIX = "hf:"
DEFAULT_ENDPOINT = "https://huggingface.co"
HUB_POLICY = RetryPolicy(max_tries=10, budget_s=900.0)
"""Policy of the Hub's calls. The Hub counts requests in windows of 5 minutes."""

_MAX_REDIRECTS = 5
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_NAME = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.%-]+))?(/(?P<folder>.+))?", re.ASCII)
_RATE_LIMIT_RESET = re.compile(r"\bt=(\d{1,6})")
_TOKEN = re.compile(r"[\x21-\x7e]*")


class HubLfs(BaseModel):
    """LFS part of a file in a tree; `oid` is the SHA-256 of the file."""

    oid: str


class HubEntry(BaseModel):
    """File or folder in a tree; `oid` is the git blob of a file without LFS."""

    type: str
    path: str
    oid: str
    size: int = 0
    lfs: HubLfs | None = None

    @property
    def checksum(self) -> str:
        """Return the checksum that the Hub states for the file."""
        return f"sha256:{self.lfs.oid}" if self.lfs else f"git-blob:{self.oid}"


class HubRevision(BaseModel):
    """Answer about a revision; `sha` is its commit."""

    sha: str


_ENTRIES = TypeAdapter(list[HubEntry])


def read_hub_token(environ: Mapping[str, str]) -> str:
    """Return the token from HF_TOKEN or from the token file of huggingface_hub; "" without a token."""
    token = environ.get("HF_TOKEN", "").strip()
    if not token:
        cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
        home = environ.get("HF_HOME") or Path(cache, "huggingface")
        try:
            token = Path(environ.get("HF_TOKEN_PATH") or Path(home, "token")).expanduser().read_text("utf-8").strip()
        except FileNotFoundError:
            return ""
    if not _TOKEN.fullmatch(token):
        raise PrefetchError(
            PrefetchCode.SOURCE_REFUSED, "the token of the Hub has characters that no token has", "Set HF_TOKEN again."
        )
    return token


class HubDataSet:
    """Data set `hf:ORG/NAME[@REVISION][/FOLDER]` on the Hub. The revision is percent-encoded; default: main."""

    def __init__(
        self,
        name: str,
        *,
        token: str,
        endpoint: str,
        connections: Connections,
        policy: RetryPolicy,
    ) -> None:
        found = _NAME.fullmatch(name)
        if found is None:
            raise PrefetchError(
                PrefetchCode.INVALID_SOURCE, f"{name!r} is no data set of the Hub", "Write it like hf:ORG/NAME/FOLDER."
            )
        self.name = name
        self.directory = f"hf/{found['repository']}"
        self._endpoint = endpoint.rstrip("/")
        self._repository = found["repository"]
        self._revision = found["revision"] or "main"
        self._folder = (found["folder"] or "").strip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._connections = connections
        self._policy = policy

    def list_files(self, cancel: CancelEvent) -> tuple[str, list[ListedFile]]:
        """Return the commit and the files, without hidden files and README.md. Raises PrefetchError."""
        api = f"{self._endpoint}/api/datasets/{self._repository}"
        _, body = self._get(f"{api}/revision/{self._revision}", cancel)
        try:
            self._revision = HubRevision.model_validate_json(body).sha
            tree = f"{api}/tree/{self._revision}" + (f"/{quote(self._folder)}" if self._folder else "")
            entries: list[HubEntry] = []
            query: str | None = "recursive=true"
            while query is not None:
                headers, body = self._get(f"{tree}?{query}", cancel)
                entries += _ENTRIES.validate_json(body)
                following = _next_query(headers)
                if following == query or len(entries) > MAX_DATASET_FILES:
                    raise UnexpectedAnswer(f"{self.name}: the list of files has no end; select a folder")
                query = following
        except ValidationError as error:
            raise UnexpectedAnswer(f"{self.name}: the Hub's answer has {error.error_count()} faults") from None
        files = [
            ListedFile(path=f"{self.directory}/{one.path}", size_bytes=one.size, checksum=one.checksum)
            for one in entries
            if one.type == "file" and one.path != "README.md" and not Path(one.path).name.startswith(".")
        ]
        return self._revision, files

    def link(self, file: ListedFile, cancel: CancelEvent) -> FileLink:
        """Return the URL of a file after all redirects. Raises ObjectMissing, PrefetchError."""
        path = file.path.removeprefix(f"{self.directory}/")
        url = f"{self._endpoint}/datasets/{self._repository}/resolve/{self._revision}/{quote(path)}"
        try:
            return self._exchange("HEAD", url, cancel)[0]
        except ObjectMissing:
            raise ObjectMissing(f"{file.path}: not on the Hub in revision {self._revision}") from None

    def _get(self, url: str, cancel: CancelEvent) -> tuple[HTTPMessage, bytes]:
        try:
            _, headers, body = self._exchange("GET", url, cancel)
        except ObjectMissing:
            raise PrefetchError(
                PrefetchCode.SOURCE_MISSING,
                f"{self.name}: the Hub has no such revision or folder",
                f"See {self._endpoint}/datasets/{self._repository}/tree/main",
            ) from None
        return headers, body

    def _exchange(self, method: str, url: str, cancel: CancelEvent) -> tuple[FileLink, HTTPMessage, bytes]:
        """Send a request and follow the redirects within the Hub; a redirect to another host is the result."""
        for _ in range(_MAX_REDIRECTS):
            headers, status, body = self._send(method, url, cancel)
            if status < 300:
                return FileLink(url, self._headers), headers, body
            if status >= 400:
                raise self._refusal(status, headers)
            url = urljoin(url, requote_uri(headers.get("Location", "")))
            if _origin(url) != _origin(self._endpoint):
                return FileLink(url), headers, b""
        raise UnexpectedAnswer(f"{self.name}: more than {_MAX_REDIRECTS} redirects, the last to {without_query(url)}")

    def _send(self, method: str, url: str, cancel: CancelEvent) -> tuple[HTTPMessage, int, bytes]:
        flight = Flight(cancel)

        def once() -> tuple[HTTPMessage, int, bytes]:
            stop_if_set(cancel)
            with self._connections.exchange(method, url, self._headers, flight) as response:
                body = response.read(_MAX_ANSWER_BYTES)
                if response.status in RETRIED_STATUSES:
                    retry_after_s = _retry_after_s(response.headers)
                    raise RetryLater(
                        Failure(reason=str(response.status), status=response.status, retry_after_s=retry_after_s)
                    )
                return response.headers, response.status, body

        def pause(delay_s: float) -> None:
            cancel.wait(delay_s)

        try:
            return call_with_retry(once, self._policy, name=self.name, pause=pause)
        except GaveUp as error:
            raise Unreachable(f"{self.name}: no usable answer from {self._endpoint} after {error}") from error.last

    def _refusal(self, status: int, headers: HTTPMessage) -> TransferError | PrefetchError:
        code, message = headers.get("X-Error-Code", ""), headers.get("X-Error-Message", "")
        place = f"{self._endpoint}/datasets/{self._repository}"
        if code in ("EntryNotFound", "RevisionNotFound"):
            return ObjectMissing(f"{self.name}: not on the Hub ({status} {code})")
        kind = PrefetchCode.SOURCE_REFUSED
        if code == "GatedRepo":
            problem = "the Hub gives the data set to permitted users only"
            remedy = f"Accept the conditions at {place} and set HF_TOKEN."
        elif status == 404 or (status == 401 and "credentials" not in message):
            kind = PrefetchCode.SOURCE_MISSING
            problem = "the Hub has no such data set, or the data set is private"
            remedy = f"Check {place}; for a private data set, set HF_TOKEN or run: hf auth login"
        else:
            problem = f"the Hub refused a request ({status} {(message or code)[:200]})"
            remedy = f"Check the rights of HF_TOKEN, and {place}"
        return PrefetchError(kind, f"{self.name}: {problem}", remedy)


def _next_query(headers: HTTPMessage) -> str | None:
    """Return the query of the next page. The host of the link is ignored, because the token goes to the Hub only."""
    links = parse_header_links(headers.get("Link", ""))
    return next((urlsplit(one["url"]).query for one in links if one.get("rel") == "next"), None)


def _retry_after_s(headers: HTTPMessage) -> float | None:
    """Return the seconds until the next try, from Retry-After or from the Hub's RateLimit header."""
    given = parse_retry_after(headers.get("Retry-After"), date=headers.get("Date"))
    reset = _RATE_LIMIT_RESET.search(headers.get("RateLimit", ""))
    return given if given is not None or reset is None else float(reset[1])


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
