"""Addresses, names and routes as this machine sees them."""

from __future__ import annotations

import socket

import pytest

from dsl.machine import network
from dsl.machine.network import Network, is_loopback, sort_addresses


def test_addresses_that_others_can_reach_come_first() -> None:
    found = [("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), ("eth0", "fe80::1%eth0")]
    found += [("eth0", "2001:db8::1"), ("eth1", "169.254.3.4"), ("eth0", "10.0.0.1"), ("ib0", "10.1.0.1")]
    found += [("lo", "::1"), ("ib0:1", "10.1.0.1")]
    assert sort_addresses(found) == (
        *("10.0.0.1", "10.1.0.1", "2001:db8::1", "172.17.0.1"),
        *("169.254.3.4", "fe80::1%eth0"),
    )


@pytest.mark.parametrize(
    "address, is_one",
    [
        *[(one, True) for one in ("127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", "localhost")],
        *[(one, False) for one in ("12.7.0.1", "::", "10.127.0.1", "n127.0.0.1")],
    ],
)
def test_loopback_is_what_every_machine_calls_itself(address: str, *, is_one: bool) -> None:
    assert is_loopback(address) is is_one


def test_own_addresses_are_ours_and_no_loopback() -> None:
    network = Network()
    assert all(network.is_own(address) for address in network.addresses())
    assert not any(is_loopback(address) for address in network.addresses())


def test_an_address_is_own_if_it_can_be_bound() -> None:
    assert Network().is_own("127.0.0.1")
    assert not Network().is_own("192.0.2.1")  # for documentation alone, RFC 5737
    assert not Network().is_own("no address")


def test_a_name_resolves_or_has_no_address() -> None:
    assert "127.0.0.1" in Network().resolve("localhost")
    assert Network().resolve("10.9.8.7") == ("10.9.8.7",)
    assert Network().resolve("no.such.name.invalid") == ()
    assert Network().resolve("a..b") == ()


def test_the_kernel_says_why_there_is_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Network().why_unreachable("127.0.0.1") == ""
    assert Network().why_unreachable("n1") == "it is no address"

    class Refusing(socket.socket):
        """As on a machine without a route."""

        def connect(self, _address: object) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Refusing)
    assert Network().why_unreachable("192.0.2.1") == "network is unreachable"


def test_a_machine_is_known_by_its_boot_its_network_and_its_name() -> None:
    identity = Network().identity()
    assert identity == Network().identity()
    assert identity.endswith(f" {socket.gethostname()}")
    assert len(identity.split()) == 3


NAMES = {
    "here": ("127.0.1.1",),
    "a": ("10.0.0.2",),
    "b": ("10.0.0.3",),
    "ib": ("10.1.0.2",),
    "six": ("2001:db8::2", "10.0.0.4"),
    "cut": ("2001:db8::2",),
}
ROUTES = {"10.0.0": "10.0.0.1", "10.1.0": "10.1.0.1"}
OWN = ("10.0.0.1", "10.1.0.1", "172.17.0.1")


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine in two networks, without a way to IPv6."""
    monkeypatch.setattr(network, "resolve", lambda name: NAMES.get(name, ()))
    monkeypatch.setattr(network, "is_own_address", lambda address: address in ("127.0.1.1", *OWN))
    monkeypatch.setattr(network, "source_address", lambda address: ROUTES.get(address[:6], ""))
    monkeypatch.setattr(network, "own_addresses", lambda: OWN)


@pytest.mark.usefixtures("imagined")
@pytest.mark.parametrize(
    "hosts, master, expected",
    [
        ("a b", "", "10.0.0.1"),
        ("ib a b", "", "10.0.0.1 10.1.0.1"),
        ("me@here ib", "", "10.1.0.1"),
        ("here a", "head.example", "head.example 10.0.0.1"),
        ("here a", "127.0.0.1", "10.0.0.1"),
        ("a here", "a", "10.0.0.1"),
        ("six", "", "10.0.0.1"),
        ("cut", "", "10.0.0.1 10.1.0.1 172.17.0.1"),
        ("ib alias", "", "10.1.0.1 10.0.0.1 172.17.0.1"),
        ("here", "", "10.0.0.1 10.1.0.1 172.17.0.1 127.0.0.1"),
        ("here", "127.0.0.1", "127.0.0.1 10.0.0.1 10.1.0.1 172.17.0.1"),
    ],
)
def test_by_which_addresses_hosts_reach_this_machine(hosts: str, master: str, expected: str) -> None:
    assert Network().addresses_toward(hosts.split(), master) == tuple(expected.split())


@pytest.mark.usefixtures("imagined")
def test_names_that_take_too_long_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "LONGEST_LOOK_S", -1.0)
    assert Network().addresses_toward(["ib"]) == OWN


def test_the_way_to_an_address_starts_at_one_of_ours() -> None:
    assert network.source_address("127.0.0.1") == "127.0.0.1"
    assert network.source_address("no address") == ""
    assert Network().addresses_toward([]) == (*Network().addresses(), "127.0.0.1")
