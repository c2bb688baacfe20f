"""Test the refusal of addresses in every notation."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.domain.webhooks import (
    BACKOFF_S,
    GIVE_UP_AFTER_S,
    address_problem,
    backoff_s,
    parse_target,
    signature,
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "webhooks.md"
HOSTILE = [
    "127.0.0.1",
    "127.1.2.3",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "169.254.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "168.63.129.16",
    "0.0.0.0",
    "0.1.2.3",
    "255.255.255.255",
    "240.0.0.1",
    "224.0.0.1",
    "239.255.255.255",
    "192.0.2.1",
    "198.51.100.1",
    "203.0.113.1",
    "198.18.0.1",
    "192.0.0.1",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd00:ec2::254",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "2001:db8::1",
    "3fff::1",
    "192.88.99.1",
    "100::1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::ffff:169.254.169.254",
    "::127.0.0.1",
    "::8.8.8.8",
    "64:ff9b::7f00:1",
    "64:ff9b::808:808",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2002:808:808::",
    "2001::1",
]
PUBLIC = [
    "8.8.8.8",
    "1.1.1.1",
    "93.184.216.34",
    "100.63.255.255",
    "172.32.0.1",
    "2606:4700:4700::1111",
    "2a00:1450:4001::1",
]
SPECIAL = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.2.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "::1/128",
    "::/96",
    "::ffff:0:0/96",
    "64:ff9b::/96",
    "2001::/32",
    "2002::/16",
    "2001:db8::/32",
    "3fff::/20",
    "192.88.99.0/24",
    "fc00::/7",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
]


@pytest.mark.parametrize("address", HOSTILE)
def test_nothing_is_sent_to(address: str) -> None:
    assert address_problem(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_no_problem(address: str) -> None:
    assert address_problem(address) is None


@pytest.mark.parametrize("text", ["", "localhost", "1.2.3", "0x7f000001", "2130706433", "1.2.3.4.5", "01.2.3.4"])
def test_what_is_no_address_is_refused(text: str) -> None:
    assert address_problem(text)


@given(st.sampled_from(SPECIAL), st.integers(0, 2**128))
def test_no_address_of_a_special_network_passes(network: str, number: int) -> None:
    net = ipaddress.ip_network(network)
    assert address_problem(str(net[number % net.num_addresses]))


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_in_disguise_never_passes(ip: ipaddress.IPv4Address) -> None:
    number = int(ip)
    for disguised in (
        ipaddress.IPv6Address(0xFFFF << 32 | number),
        ipaddress.IPv6Address(number),
        ipaddress.IPv6Address((0x64FF9B << 96) | number),
        ipaddress.IPv6Address((0x2002 << 112) | number << 80),
    ):
        assert address_problem(str(disguised))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://hooks.example.com/", "is not https"),
        ("ftp://hooks.example.com/", "is not https"),
        ("file:///etc/passwd", "is not https"),
        ("hooks.example.com", "is not https"),
        ("https://", "names no host"),
        ("https:///path", "names no host"),
        ("https://hooks.example.com:0/", "names no host"),
        ("https://hooks.example.com:99999/", "is no address"),
        ("https://[::1/", "is no address"),
        ("https://user:secret@hooks.example.com/", "has a user"),
        ("https://hooks.example.com@127.0.0.1/", "has a user"),
        ("https://hooks.example.com/#here", "a fragment"),
        ("https://hooks.example.com/a b", "characters"),
        ("https://hooks.example.com\\@127.0.0.1/", "characters"),
        ("https://hooks.example.com/\r\nx: y", "characters"),
        ("https://hööks.example.com/", "characters"),
        ("https://localhost/", "leads to localhost"),
        ("https://LOCALHOST./", "leads to localhost"),
        ("https://a.localhost/", "leads to a.localhost"),
        ("https://printer.local/", "leads to printer.local"),
        ("https://metadata.google.internal/", "leads to metadata.google.internal"),
        ("https://127.0.0.1/", "a loopback address"),
        ("https://169.254.169.254/latest/meta-data/", "a cloud"),
        ("https://[::ffff:10.0.0.1]/", "leads to ::ffff:10.0.0.1"),
        ("https://[fe80::1%25eth0]/", "leads to"),
        ("https://[::1]:8443/", "a loopback address"),
        ("https://127.0.0.1./", "a loopback address"),
        ("https://127.1/", "writes an IPv4 address"),
        ("https://2130706433/", "writes an IPv4 address"),
        ("https://0177.0.0.1/", "writes an IPv4 address"),
        ("https://0x7f000001/", "writes an IPv4 address"),
        ("https://0x7f.1/", "writes an IPv4 address"),
        ("https://8.8.2056/", "writes an IPv4 address"),
        ("https://a.0x/", "writes an IPv4 address"),
        ("https://localhost../", "names no host"),
        ("https://.example.com/", "names no host"),
        ("https://a..b/", "names no host"),
        ("https://%31%32%37.0.0.1/", "names no host"),
        ("https://hooks.example.com;127.0.0.1/", "names no host"),
        (f"https://{'a' * 64}.example.com/", "names no host"),
        (f"https://{'a.' * 130}com/", "names no host"),
    ],
)
def test_an_address_is_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse_target(url)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_VALUE, "url")
    assert why in caught.value.message


def test_an_address_is_taken_apart() -> None:
    target = parse_target("https://hooks.example.com:8443/a/b?c=d%20e")
    assert (target.host, target.port, target.path, target.secure) == ("hooks.example.com", 8443, "/a/b?c=d%20e", True)
    assert target.host_header == "hooks.example.com:8443"
    assert parse_target("https://Hooks.example.com").host_header == "hooks.example.com"
    assert parse_target("https://[2606:4700::1]/").host_header == "[2606:4700::1]"
    assert parse_target("https://8.8.8.8/").host == "8.8.8.8"
    for host in ("xn--hks-0qa.example.com", "a_b.example.com", "3com.com", "1.2.3.4.example", "0x.example", "hooks"):
        assert parse_target(f"https://{host}/").host == host
    assert parse_target("https://hooks.example.com./").host == "hooks.example.com", "as the certificate says it"


def test_only_the_very_origin_of_a_test_is_trusted() -> None:
    origin = "http://127.0.0.1:8000"
    assert parse_target(f"{origin}/x", origin).trusted
    for other in ("http://127.0.0.1:8001/x", "https://127.0.0.1:8000/x", "http://127.0.0.1:8000@evil.example/x"):
        with pytest.raises(Refusal):
            parse_target(other, origin)
    with pytest.raises(Refusal):
        parse_target("http://127.0.0.1:8000/x", "http://127.0.0.1:800")
    assert not parse_target("https://hooks.example.com/", origin).trusted


def test_the_signature_is_over_instant_and_body() -> None:
    # A receiver computes the digest so: printf '%s' '1790000000.{"a":1}' | openssl dgst -sha256 -hmac key
    digest = "7a4d26944722100249410c8c7f2e76c3cc6e9735fcc98b39e44a122da5490ffc"
    assert signature("key", 1_790_000_000, b'{"a":1}') == f"t=1790000000,v1={digest}"
    signed = {signature(key, at, body) for key in ("a", "b") for at in (1, 11) for body in (b"1.x", b".x", b"x")}
    assert len(signed) == 12, "nothing may be moved between the parts"


def test_it_is_tried_as_the_document_says() -> None:
    minute = 60
    assert [backoff_s(attempts) for attempts in range(1, 10)] == [
        *(5, 15, minute, 5 * minute, 15 * minute, 30 * minute),
        *(3600, 3600, 3600),
    ]
    said = "tried again after 5 s, 15 s, 1, 5, 15, 30 minutes and then every hour, for one day"
    assert said in " ".join(DOCUMENT.read_text().split())
    assert GIVE_UP_AFTER_S == 24 * 3600


def test_it_is_tried_for_a_day_ever_more_seldom() -> None:
    waits = [backoff_s(attempts) for attempts in range(1, 60)]
    assert waits == sorted(waits) and waits[0] == BACKOFF_S[0] and waits[-1] == BACKOFF_S[-1]
    assert sum(waits[:30]) > GIVE_UP_AFTER_S > sum(waits[:20])
    assert max(waits) <= 12 * 3600, "what SQS allows"
