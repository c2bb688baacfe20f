"""Where a bucket is, and requests to it with the signature that AWS asks for (version 4).

Credentials come from where AWS's own tools take them: `AWS_ACCESS_KEY_ID`, profiles (`AWS_PROFILE`), a web identity, or
the machine's role. So does the region; `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL` names another store than AWS's.
"""

from __future__ import annotations

import configparser
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from awscrt import auth, http, io
from awscrt.exceptions import AwsCrtError

from gpu_client.ring.errors import RingMismatch

_CREDENTIALS_TIMEOUT_S = 30.0
_LOOKED_UP_AFTER_S = 900.0
"""Credentials are asked for again after so long, since profiles are edited and roles change."""
_BEFORE_THE_END_S = 300.0
_TRIED_AGAIN_AFTER_S = 10.0
_DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True)
class Endpoint:
    """One bucket's origin, and what paths begin with there."""

    origin: str
    """Without a slash at its end."""
    path: str
    """The bucket where it is named in the path, as other stores than AWS's want it; ends with `/`."""

    @property
    def host(self) -> str:
        """As it is signed, and as http.client sends it: without a port that is the scheme's own."""
        parts = urlsplit(self.origin)
        own = {"http": 80, "https": 443}[parts.scheme]
        name = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
        return name if parts.port in (None, own) else f"{name}:{parts.port}"

    @classmethod
    def of_bucket(cls, bucket: str, region: str, environment: Mapping[str, str]) -> Endpoint:
        """Raises RingMismatch for an endpoint that is none."""
        own = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        if own:
            wrong = RingMismatch(
                f"the endpoint {own[:100]!r} is no URL of a store", "Set AWS_ENDPOINT_URL_S3 like https://host:port"
            )
            try:
                parts = urlsplit(own)
                _ = parts.port
            except ValueError:
                raise wrong from None
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                raise wrong
            return cls(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", f"{parts.path.rstrip('/')}/{bucket}/")
        suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        if "." in bucket:  # no certificate is good for it as a name of a host
            return cls(f"https://s3.{region}.{suffix}", f"/{bucket}/")
        return cls(f"https://{bucket}.s3.{region}.{suffix}", "/")


def region_of(environment: Mapping[str, str]) -> str:
    """As the environment or the profile says; where neither does, the one that AWS itself begins with."""
    said = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    if said:
        return said
    name = environment.get("AWS_PROFILE") or "default"
    path = Path(environment.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()
    profiles = configparser.RawConfigParser(strict=False)
    try:
        profiles.read(path, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        raise RingMismatch(f"{path} cannot be read ({error})", "Mend it, or set AWS_REGION") from error
    for section in ("default",) if name == "default" else (f"profile {name}", name):
        if profiles.has_option(section, "region"):
            return profiles.get(section, "region").strip()
    return _DEFAULT_REGION


class Signer:
    """Signs requests of one process. Threads may share it; a forked process needs its own."""

    def __init__(self, region: str, *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix time, for the signatures."""
        self.region = region
        self._clock = clock
        self._ahead_s = 0.0
        self._lock = threading.Lock()
        self._chain: Any = None
        self._kept: Any = None
        self._good_until = 0.0

    def signed(self, method: str, target: str, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers with those that prove who asks. `headers` name the `Host`; `target`: path and query, encoded.

        The body is not part of it. Raises PermissionError without credentials.
        """
        request = http.HttpRequest(method, target, http.HttpHeaders(list(headers.items())))
        at = datetime.fromtimestamp(self._clock(), UTC) + timedelta(seconds=self._ahead_s)
        config = auth.AwsSigningConfig(
            credentials_provider=self._credentials(),
            region=self.region,
            service="s3",
            date=at,
            use_double_uri_encode=False,
            should_normalize_uri_path=False,
            signed_body_value=auth.AwsSignedBodyValue.UNSIGNED_PAYLOAD,
            signed_body_header_type=auth.AwsSignedBodyHeaderType.X_AMZ_CONTENT_SHA_256,
        )
        auth.aws_sign_request(request, config).result(_CREDENTIALS_TIMEOUT_S)
        return dict(request.headers)

    def forget_credentials(self) -> None:
        """The store does not take them any more: look them up again."""
        with self._lock:
            self._kept = self._chain = None

    def set_time(self, store_at: datetime) -> None:
        """Sign by the store's clock, which differs from this machine's."""
        self._ahead_s = store_at.timestamp() - self._clock()

    def _credentials(self) -> Any:
        """Of the kind that needs no thread to be asked: signing waits for nothing."""
        with self._lock:
            now = time.monotonic()
            if self._kept is None or now >= self._good_until:
                try:
                    found = self._looked_up()
                except PermissionError:
                    if self._kept is None:
                        raise
                    # The last ones may be good for some time yet; the store tells when they are not.
                    self._good_until = now + _TRIED_AGAIN_AFTER_S
                else:
                    self._kept = auth.AwsCredentialsProvider.new_static(
                        found.access_key_id, found.secret_access_key, found.session_token
                    )
                    left_s = _LOOKED_UP_AFTER_S
                    if found.expiration is not None:
                        left_s = (found.expiration - datetime.now(UTC)).total_seconds() - _BEFORE_THE_END_S
                    self._good_until = now + min(max(left_s, _TRIED_AGAIN_AFTER_S), _LOOKED_UP_AFTER_S)
            return self._kept

    def _looked_up(self) -> Any:
        try:
            if self._chain is None:
                # Not awscrt's own shared threads: a forked process would wait for its parent's for ever.
                threads = io.EventLoopGroup(1)
                bootstrap = io.ClientBootstrap(threads, io.DefaultHostResolver(threads))
                self._chain = auth.AwsCredentialsProvider.new_default_chain(bootstrap)
            return self._chain.get_credentials().result(_CREDENTIALS_TIMEOUT_S)
        except (AwsCrtError, TimeoutError) as error:
            raise PermissionError(
                f"there are no AWS credentials ({getattr(error, 'name', 'timed out')}): set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine a role"
            ) from error
