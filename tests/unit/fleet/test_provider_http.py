"""The HTTP client of the drivers repeats no key and no signature in an error."""

from __future__ import annotations

import time

import pytest

from fakes.server import FakeAnswer, FakeCall, FakeProvider
from functions.fleet.drivers.protocol import ProviderRefused, ProviderUnavailable
from functions.fleet.drivers.provider_http import ProviderHttp

KEY = "canary-5e1f0c2d9b7a4e3f"


class EchoingProvider(FakeProvider):
    """A provider whose errors repeat the key, as some do."""

    status = 401

    def answer(self, call: FakeCall) -> FakeAnswer:
        sent = call.headers.get("authorization", call.headers.get("salad-api-key", ""))
        return FakeAnswer(self.status, {"msg": f"Invalid user key {sent}", "key": sent})


@pytest.mark.parametrize("headers", [{"Authorization": f"Bearer {KEY}"}, {"Salad-Api-Key": KEY}])
def test_an_error_that_repeats_the_key_is_read_without_it(headers: dict[str, str]) -> None:
    with EchoingProvider(time.time) as provider:
        http = ProviderHttp(provider.url, headers)
        with pytest.raises(ProviderRefused) as raised:
            http.read("GET", "/users/current")
        assert "Invalid user key" in str(raised.value) and KEY not in str(raised.value)
        for status in (200, 400):
            provider.status = status  # type: ignore[attr-defined]
            answer = http.send("PUT", "/asks/1", body={})
            assert answer.body["key"].endswith("[key]") and KEY not in repr(answer)
            assert KEY not in http.read_stream("/logs").text


def test_an_unreachable_stream_is_named_without_its_signature() -> None:
    with FakeProvider(time.time) as provider:
        url = provider.url
    with pytest.raises(ProviderUnavailable) as raised:
        ProviderHttp(url, {}).read_stream("/logs/1?X-Amz-Signature=abc")
    assert str(raised.value).startswith("GET /logs/1: no usable answer")


@pytest.mark.parametrize("key", [f"{KEY}\nX-Evil: 1", f"{KEY}\u00e9", f"{KEY}\u4e2d"])
def test_a_key_that_http_cannot_carry_is_refused_without_being_named(key: str) -> None:
    http = ProviderHttp("http://127.0.0.1:9", {"Authorization": f"Bearer {key}"})
    for call in (lambda: http.read("GET", "/x"), lambda: http.send("PUT", "/x"), lambda: http.read_stream("/x")):
        with pytest.raises(ProviderRefused) as raised:
            call()
        assert KEY not in repr(raised.value) and raised.value.__context__ is None
