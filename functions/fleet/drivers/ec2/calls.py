"""Call Amazon's APIs: reads are tried twice, a mutating call is sent exactly once, errors are judged by their code."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import botocore.loaders
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ProxyConnectionError,
)
from botocore.parsers import ResponseParserError

from baton.contract.fleets.providers import Ec2Account
from functions.fleet.drivers.protocol import ProviderRefused, ProviderUnavailable, RefusalKind
from functions.fleet.drivers.provider_http import READ_TRIES, TIMEOUT_S, AnswerLost, CallNotSent

PRICES_REGION = "us-east-1"
"""The price list of all regions is served there."""
THROTTLED = frozenset({"RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled"})
KINDS: dict[str, tuple[RefusalKind, str]] = {
    **dict.fromkeys(
        (
            "AuthFailure",
            "InvalidClientTokenId",
            "UnrecognizedClientException",
            "InvalidSignatureException",
            "SignatureDoesNotMatch",
            "ExpiredToken",
            "ExpiredTokenException",
            "RequestExpired",
            "MissingAuthenticationToken",
        ),
        (RefusalKind.KEY, "store a valid access key with `baton fleet login ec2`"),
    ),
    **dict.fromkeys(
        ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException"),
        (RefusalKind.PERMISSION, "attach the policy of docs/providers/ec2.md to the user of the key"),
    ),
    **dict.fromkeys(
        ("OptInRequired", "Blocked", "PendingVerification"),
        (RefusalKind.CREDIT, "the account may not rent: see the mail of AWS, or the region's opt-in"),
    ),
    **dict.fromkeys(
        ("InvalidAMIID.NotFound", "InvalidAMIID.Malformed", "InvalidAMIID.Unavailable"),
        (RefusalKind.IMAGE, "name a machine image of the region: `baton fleet login ec2`"),
    ),
    **dict.fromkeys(
        ("VolumeLimitExceeded", "MaxIOPSLimitExceeded", *THROTTLED),
        (RefusalKind.QUOTA, "ask for a higher quota in the console of AWS (Service Quotas), or for fewer machines"),
    ),
}
"""Refusals that hold for all offers, with their remedies."""


class Ec2Refusal(ProviderUnavailable):
    """Amazon answers a call with an error. `sure`: the call certainly had no effect.

    A caller that does not know the code takes the refusal as no answer, because nothing follows about any machine.
    """

    def __init__(self, call: str, code: str, message: str, *, sure: bool) -> None:
        super().__init__(f"{call}: {code}: {' '.join(message.split())[:300]}")
        self.code = code
        self.sure = sure


class Ec2Calls:
    """Clients of one account and region, with the account's own key."""

    def __init__(self, account: Ec2Account, *, timeout_s: float = TIMEOUT_S) -> None:
        self._account = account
        # A mutating call must be sent once; a read has its second try here.
        self._config = Config(
            connect_timeout=timeout_s, read_timeout=timeout_s, retries={"mode": "standard", "total_max_attempts": 1}
        )
        self._clients: dict[str, Any] = {}

    def read(self, call: str, service: str = "ec2", **parameters: Any) -> dict[str, Any]:
        """Make a call without side effects. Raises ProviderUnavailable, ProviderRefused, Ec2Refusal."""
        problem = ""
        for _ in range(READ_TRIES):
            try:
                return self._call(service, call, parameters)
            except (AnswerLost, CallNotSent) as error:
                problem = str(error)
            except Ec2Refusal as error:
                if error.code in THROTTLED:
                    raise ProviderUnavailable(str(error)) from error
                if error.code in KINDS:
                    kind, remedy = KINDS[error.code]
                    raise ProviderRefused(kind, f"{error}. Remedy: {remedy}.") from error
                if error.sure:
                    raise
                problem = str(error)
        raise ProviderUnavailable(problem)

    def pages(self, call: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Make a call without side effects for each page of its answer."""
        token: dict[str, str] = {}
        while True:
            page = self.read(call, **parameters, **token)
            yield page
            if not page.get("NextToken"):
                return
            token = {"NextToken": page["NextToken"]}

    def send(self, call: str, **parameters: Any) -> dict[str, Any]:
        """Make a mutating call exactly once. Raises AnswerLost, CallNotSent, Ec2Refusal."""
        return self._call("ec2", call, parameters)

    def _call(self, service: str, call: str, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = getattr(self._client(service), call)(**parameters)
        except ClientError as error:
            found, status = error.response["Error"], error.response["ResponseMetadata"]["HTTPStatusCode"]
            code = str(found.get("Code", status))
            raise Ec2Refusal(call, code, str(found.get("Message", "")), sure=400 <= status < 500) from error
        except (EndpointConnectionError, ConnectTimeoutError, ProxyConnectionError) as error:
            raise CallNotSent(f"{call}: Amazon cannot be reached") from error
        except (BotoCoreError, ResponseParserError) as error:
            raise AnswerLost(f"{call}: no usable answer ({type(error).__name__})") from error
        return answer

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            account = self._account
            session = botocore.session.Session()
            session.register_component("data_loader", _descriptions())
            self._clients[service] = session.create_client(
                service,
                region_name=PRICES_REGION if service == "pricing" else account.region,
                endpoint_url=account.address,
                aws_access_key_id=account.access_key_id,
                aws_secret_access_key=account.secret_access_key.get_secret_value(),
                config=self._config,
            )
        return self._clients[service]


@cache
def _descriptions() -> Any:
    """Return botocore's loader of service descriptions: EC2's is read once, which takes a third of a second."""
    return botocore.loaders.create_loader()
