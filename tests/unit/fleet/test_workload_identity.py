"""Test the proof of identity that Salad signs for a machine: whose it is, who signed it, when, and with which key."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import EnrollRequest
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.providers import SaladAccount
from fakes.salad.api import JWKS, RTX_4090, FakeSalad
from fakes.salad.imds import FakeImds
from fakes.salad.signing_key import WorkloadKey
from functions.api.http.context import Context
from functions.api.machines import es256
from functions.api.machines.workload_identity import ASK_AGAIN_S, SKEW_S, require_identity
from functions.domain.errors import Refusal
from tests.conformance.drivers.driven_salad import salad_account
from tests.kits.clock import Clock
from tests.unit.fleet.test_machine_states import make_machine

NAME = "dep10000-nights-1"
LIFE_S = 300
# The example of Salad's documentation ("Enable JWT Authentication"), signed by Salad itself.
DOCUMENTED_KEY = {
    "x": "66bOTJjjNpaZChHcrGx7KVeR5kYqCNo9L00XV_h3XvI",
    "y": "3erAKS42AdK7XK92OLGIRvy1TAPyYwBUC9bAldNjWiY",
}
DOCUMENTED_HEADER = {"alg": "ES256", "kid": "salad-workload-2025-03-19T16:59:51.0020098Z", "typ": "JWT"}
DOCUMENTED_CLAIMS = {
    "sub": "d2d83275-b10a-c957-8f1c-89666a05dc79",
    "jti": "87659e43-19b0-4338-b3cc-d0a303c72af6",
    "salad_machine_id": "d2d83275-b10a-c957-8f1c-89666a05dc79",
    "salad_workload_id": "215f0bf7-c4c2-4457-85c5-71cd0819def7",
    "salad_workload_name": "rxlab-demo-jwt-authentication",
    "salad_organization_id": "2c3573b6-88de-4067-821f-1af088bd9c6a",
    "salad_organization_name": "rxlab",
    "aud": "2c3573b6-88de-4067-821f-1af088bd9c6a",
    "exp": 1743101746,
    "iss": "https://matrix-api.salad.io",
    "iat": 1743101446,
    "nbf": 1743101446,
}
DOCUMENTED_SIGNATURE = "B2VjVvEb3Jbwhs7fxnvbaaYE4tYmppW1--UI4XFCCeiDgPeNdRGSyBeQ7H7zt5oNOtdwW4MkKVQT9VyevxbIlw"


def encode(value: Any) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@pytest.fixture
def clock() -> Clock:
    return Clock(1_700_000_000)


@pytest.fixture
def salad(clock: Clock) -> Iterator[FakeSalad]:
    with FakeSalad(clock) as salad:
        container = {"image": "i", "resources": {"cpu": 4, "memory": 4096, "gpu_classes": [RTX_4090]}}
        policies = {"replicas": 1, "restart_policy": "always", "autostart_policy": True}
        salad.cloud.create({"name": NAME, **policies, "container": container})
        yield salad


@pytest.fixture
def imds(salad: FakeSalad) -> FakeImds:
    key = WorkloadKey()
    salad.keys = [WorkloadKey("another").jwk, {"kty": "RSA", "kid": key.key_id + "x"}, key.jwk]
    return FakeImds(salad, NAME, sign=key.sign, key_id=key.key_id)


def check(salad: FakeSalad, proof: str | None, now: float, **account: Any) -> None:
    stored = SimpleNamespace(account=salad_account(salad).model_copy(update=account))
    context = SimpleNamespace(accounts=SimpleNamespace(known=lambda: {"salad": stored}))
    if proof is not None:
        EnrollRequest(identity=proof)
    require_identity(cast("Context", context), make_machine(State.BOOTING, id=NAME), proof, int(now))


def refused(salad: FakeSalad, proof: str | None, now: float, **account: Any) -> str:
    with pytest.raises(Refusal) as caught:
        check(salad, proof, now, **account)
    assert (caught.value.code, caught.value.field) == (ErrorCode.IDENTITY_REFUSED, "identity")
    if proof:
        assert proof.rpartition(".")[2] not in caught.value.message
    return caught.value.message


def test_the_proof_of_the_machines_own_container_is_accepted(salad: FakeSalad, imds: FakeImds, clock: Clock) -> None:
    check(salad, imds.token(), clock())
    check(salad, imds.token(), clock() + LIFE_S + SKEW_S)
    check(salad, imds.token(), clock() - SKEW_S)
    # A function asks for the keys once, not for each enrolment.
    assert len([one for one in salad.calls if one.path == JWKS]) == 1


def test_a_proof_has_its_time(salad: FakeSalad, imds: FakeImds, clock: Clock) -> None:
    for at in (clock() + LIFE_S + SKEW_S + 1, clock() - SKEW_S - 1):
        assert "it is valid from" in refused(salad, imds.token(), at)


@pytest.mark.parametrize(
    ("claims", "problem"),
    [
        ({"salad_workload_name": "dep10000-nights-2"}, "names the container group 'dep10000-nights-2'"),
        ({"salad_organization_name": "evil"}, "names the organization 'evil' instead of 'acme'"),
        ({"salad_workload_name": None}, "the claim salad_workload_name is missing"),
        ({"exp": "soon"}, "the claim exp is missing"),
    ],
)
def test_the_proof_of_another_container_is_refused(
    salad: FakeSalad, imds: FakeImds, clock: Clock, claims: dict[str, Any], problem: str
) -> None:
    imds.claims = claims
    assert problem in refused(salad, imds.token(), clock())


def test_only_the_providers_keys_sign(salad: FakeSalad, imds: FakeImds, clock: Clock) -> None:
    header, claims, signature = imds.token().split(".")
    stranger = WorkloadKey(imds.key_id)
    forged = f"{header}.{claims}.{encode(stranger.sign(f'{header}.{claims}'.encode()))}"
    assert "its signature is false" in refused(salad, forged, clock())
    assert "its signature is false" in refused(salad, f"{header}.{claims}.{signature[:-8]}", clock())
    imds.key_id = "unknown"
    assert f"a key that {salad.url}{JWKS} does not list" in refused(salad, imds.token(), clock() + ASK_AGAIN_S)


@pytest.mark.parametrize(
    "header",
    [
        {"alg": "none", "kid": "k"},
        {"alg": "HS256", "kid": "k"},
        {"alg": "RS256", "kid": "k"},
        {"alg": ["ES256"], "kid": "k"},
        {"alg": "ES256"},
        {"alg": "ES256", "kid": 1},
        [],
        b"{",
        b"[" * 1400,
        b"\xff",
    ],
)
def test_a_proof_does_not_choose_its_algorithm_or_form(
    salad: FakeSalad, imds: FakeImds, clock: Clock, header: Any
) -> None:
    refused(salad, f"{encode(header)}.e30.{imds.token().rpartition('.')[2]}", clock())


def test_a_machine_without_a_proof_or_a_deployment_without_an_account_is_refused(
    salad: FakeSalad, imds: FakeImds, clock: Clock
) -> None:
    assert "there is none" in refused(salad, None, clock())
    context = SimpleNamespace(accounts=SimpleNamespace(known=dict))
    with pytest.raises(Refusal, match="no account at salad"):
        require_identity(cast("Context", context), make_machine(State.BOOTING), imds.token(), int(clock()))


@pytest.mark.parametrize("fault", ["500", "html", "truncated", "401"])
def test_keys_that_cannot_be_read_are_asked_for_again(
    salad: FakeSalad, imds: FakeImds, clock: Clock, fault: Any
) -> None:
    salad.inject(fault, f"GET {JWKS}", count=2)
    with pytest.raises(Refusal) as caught:
        check(salad, imds.token(), clock())
    assert caught.value.code is ErrorCode.UNAVAILABLE
    salad.faults.clear()
    check(salad, imds.token(), clock())


def test_a_new_key_is_found_and_unknown_keys_do_not_make_us_ask_at_once(
    salad: FakeSalad, imds: FakeImds, clock: Clock
) -> None:
    check(salad, imds.token(), clock())
    new = WorkloadKey("salad-workload-2026-11-25T16:59:51.0014839Z")
    imds.sign, imds.key_id = new.sign, new.key_id
    salad.keys.append(new.jwk)
    refused(salad, imds.token(), clock() + ASK_AGAIN_S - 1)
    check(salad, imds.token(), clock() + ASK_AGAIN_S)


def test_the_example_of_salads_documentation_is_signed_by_its_documented_key(salad: FakeSalad) -> None:
    salad.keys = [{"crv": "P-256", "kty": "EC", "kid": str(DOCUMENTED_HEADER["kid"]), **DOCUMENTED_KEY}]
    proof = f"{encode(DOCUMENTED_HEADER)}.{encode(DOCUMENTED_CLAIMS)}.{DOCUMENTED_SIGNATURE}"
    # The signature holds; the container is another one.
    message = refused(salad, proof, 1743101500, organization="rxlab")
    assert "it names the container group 'rxlab-demo-jwt-authentication'" in message
    later = encode({**DOCUMENTED_CLAIMS, "exp": 1743101747})
    changed = f"{encode(DOCUMENTED_HEADER)}.{later}.{DOCUMENTED_SIGNATURE}"
    assert "its signature is false" in refused(salad, changed, 1743101500)
    assert isinstance(salad_account(salad), SaladAccount)


def test_signatures_are_judged_as_the_package_cryptography_does() -> None:
    key, other = WorkloadKey(), WorkloadKey()
    rng = random.Random(1)
    for length in (0, 1, 1000):
        message = rng.randbytes(length)
        signature = key.sign(message)
        assert es256.verify(message, signature, key.point)
        assert not es256.verify(message + b"!", signature, key.point)
        assert not es256.verify(message, signature, other.point)
        flipped = bytearray(signature)
        flipped[rng.randrange(64)] ^= 1 << rng.randrange(8)
        assert not es256.verify(message, bytes(flipped), key.point)


@pytest.mark.parametrize(
    "signature",
    [b"", b"\0" * 64, b"\0" * 32 + b"\1" * 32, b"\1" * 32 + b"\0" * 32, b"\xff" * 64, b"\1" * 63, b"\1" * 65],
)
def test_numbers_out_of_range_are_no_signature(signature: bytes) -> None:
    assert not es256.verify(b"m", signature, WorkloadKey().point)


@pytest.mark.parametrize("point", [(0, 0), (1, 1), (-1, 1), (2**256, 1)])
def test_a_key_that_is_no_point_of_the_curve_signs_nothing(point: tuple[int, int]) -> None:
    """(0, 0) would make every sum of the verification its other summand."""
    key = WorkloadKey()
    assert not es256.verify(b"m", key.sign(b"m"), point)
