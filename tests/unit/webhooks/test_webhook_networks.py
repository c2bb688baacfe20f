"""Test the address check on every entry of IANA's special-purpose registries, independent of the Python version."""

from __future__ import annotations

import ipaddress

import pytest

from functions.domain.webhooks import address_problem

# The registries `iana-ipv4-special-registry` and `iana-ipv6-special-registry`, column "Globally Reachable".
# Deprecated entries and entries whose column says N/A (6to4, Teredo) count as unreachable.
UNREACHABLE = [
    "0.0.0.0/8",
    "0.0.0.0/32",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.0.0/29",
    "192.0.0.8/32",
    "192.0.0.170/32",
    "192.0.0.171/32",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "240.0.0.0/4",
    "255.255.255.255/32",
    "::1/128",
    "::/128",
    "::ffff:0:0/96",
    "64:ff9b:1::/48",
    "100::/64",
    "100:0:0:1::/64",
    "2001::/23",
    "2001::/32",
    "2001:2::/48",
    "2001:10::/28",
    "2001:db8::/32",
    "2002::/16",
    "3fff::/20",
    "5f00::/16",
    "fc00::/7",
    "fe80::/10",
]
# Reachable by the registry, and refused: translators and anycast addresses of the network itself, no web servers.
REACHABLE_BUT_REFUSED = [
    "192.0.0.9/32",
    "192.0.0.10/32",
    "64:ff9b::/96",
    "2001:1::1/128",
    "2001:1::2/128",
    "2001:1::3/128",
    "2001:3::/32",
    "2001:4:112::/48",
    "2001:20::/28",
    "2001:30::/28",
]
REACHABLE = ["192.31.196.0/24", "192.52.193.0/24", "192.175.48.0/24", "2620:4f:8000::/48"]
# The neighbors of refused networks belong to the public.
NEIGHBORS = [
    "1.0.0.0",
    "9.255.255.255",
    "11.0.0.0",
    "126.255.255.255",
    "128.0.0.0",
    "169.253.255.255",
    "169.255.0.0",
    "172.15.255.255",
    "191.255.255.255",
    "192.0.1.0",
    "192.0.3.0",
    "192.88.98.255",
    "192.88.100.0",
    "192.167.255.255",
    "192.169.0.0",
    "198.17.255.255",
    "198.20.0.0",
    "198.51.99.255",
    "203.0.114.0",
    "223.255.255.255",
    "2001:200::",
    "2001:db7:ffff::",
    "2001:db9::",
    "2003::",
    "3ffe:ffff::",
]
# 127.0.0.1, 10.0.0.1 and 169.254.169.254 in every form that carries an IPv4 address.
EMBEDDING = [
    "::{}",
    "::ffff:{}",
    "64:ff9b::{}",
    "64:ff9b:1::{}",
    "64:ff9b:1:ffff::{}",
    "2002:{}::1",
    "2001:0:{}::1",
    "2001:0:808:808:0:0:{}",
]


@pytest.mark.parametrize("network", UNREACHABLE + REACHABLE_BUT_REFUSED)
def test_no_address_of_a_special_network_is_a_target(network: str) -> None:
    net = ipaddress.ip_network(network)
    for number in {0, 1, net.num_addresses // 2, net.num_addresses - 1}:
        if number < net.num_addresses:
            assert address_problem(str(net[number])), net[number]


@pytest.mark.parametrize("address", NEIGHBORS + [str(ipaddress.ip_network(each)[1]) for each in REACHABLE])
def test_an_address_beside_a_special_network_is_a_target(address: str) -> None:
    assert address_problem(address) is None


@pytest.mark.parametrize("form", EMBEDDING)
@pytest.mark.parametrize("inner", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "8.8.8.8"])
def test_an_embedded_ipv4_address_is_refused(form: str, inner: str) -> None:
    number = int(ipaddress.IPv4Address(inner))
    for written in (number, number ^ 0xFFFFFFFF):  # Teredo inverts the client's address
        assert address_problem(form.format(f"{written >> 16:x}:{written & 0xFFFF:x}"))


@pytest.mark.parametrize("address", ["4000::1", "1::1", "200::1", "8000::1", "e000::1", "fe00::1"])
def test_an_unassigned_address_is_refused(address: str) -> None:
    assert address_problem(address) == "a reserved address"


def test_the_table_decides_whatever_python_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in (ipaddress.IPv4Address, ipaddress.IPv6Address):
        for name in ("is_global", "is_private", "is_reserved", "is_loopback", "is_link_local", "is_multicast"):
            monkeypatch.setattr(family, name, property(lambda _: pytest.fail("the verdict depends on the version")))
    assert address_problem("192.0.0.8") == "a private address"
    assert address_problem("127.0.0.1") == "a loopback address"
    assert address_problem("8.8.8.8") is None
    assert address_problem("2606:4700::1") is None
