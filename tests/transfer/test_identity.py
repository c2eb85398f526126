"""Addresses: their hosts, who reaches them, and what a certificate there has to name."""

from __future__ import annotations

from kvstrata.transfer.identity import host_of, is_loopback, named_host


def test_addresses_that_others_do_not_reach() -> None:
    near = ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/x")
    far = ("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "host:1", "localhost.evil.org:1", "[fe80::1]:1")
    assert all(map(is_loopback, near)) and not any(map(is_loopback, far))


def test_the_host_of_an_address() -> None:
    assert [host_of(each) for each in ("a.b:1", "[::1]:1", "10.0.0.1:1")] == ["a.b", "::1", "10.0.0.1"]
    assert host_of("unix:/x") == host_of("unix:/x:1") == ""


def test_a_certificate_names_the_host_that_the_caller_gave() -> None:
    assert named_host("master:1", "elsewhere:2") == "master"
    assert named_host("[::1]:1", "elsewhere:2") == "::1"
    assert named_host(":1", "elsewhere:2") == ""
    assert named_host("unix:/run/master:1", "elsewhere:2") == "elsewhere"
