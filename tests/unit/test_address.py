from __future__ import annotations

import shlex

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atoll.protocol.address import MAX_PEERS, Multiaddr, RunAddress, is_multiaddr
from atoll.protocol.errors import AddressError
from atoll.protocol.identity import base58_encode, peer_id_of

PEER = peer_id_of(bytes(range(32)))
RSA = base58_encode(b"\x12\x20" + bytes(range(32)))
RUN = bytes(range(32))


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/127.0.0.1/tcp/31337",
        "/ip4/10.0.0.1/tcp/1/ws",
        "/ip6/::1/tcp/65535",
        "/ip6/2001:db8::7/udp/4001/quic-v1",
        "/ip4/1.2.3.4/udp/4001/quic",
        "/dns4/boot.example.org/tcp/443/wss",
        "/dns/boot_1/tcp/443/tls/ws",
        "/dns6/a.b/tcp/80",
    ],
)
def test_multiaddresses(text: str) -> None:
    for full in (
        text,
        f"{text}/p2p/{PEER}",
        f"{text}/p2p/{RSA}/p2p-circuit",
        f"{text}/p2p/{RSA}/p2p-circuit/p2p/{PEER}",
    ):
        parsed = Multiaddr.parse(full)
        assert str(parsed) == full
        assert str(parsed.at(PEER)) == full.removesuffix(f"/p2p/{PEER}") + f"/p2p/{PEER}"
        assert is_multiaddr(full)
    assert Multiaddr.parse(f"{text}/p2p/{RSA}/p2p-circuit").peer is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a slash at the beginning"),
        ("127.0.0.1:31337", "a slash at the beginning"),
        ("/", "expected ip4, ip6, dns4, dns6 or dns first"),
        ("/ipv4/1.2.3.4/tcp/1", "expected ip4, ip6, dns4, dns6 or dns first, found 'ipv4'"),
        ("/unix/tmp/x", "found 'unix'"),
        ("/ip4", "expected an IPv4 address after /ip4/, found ''"),
        ("/ip4/1.2.3/tcp/1", "expected an IPv4 address"),
        ("/ip4/1.2.3.04/tcp/1", "expected an IPv4 address"),
        ("/ip4/::1/tcp/1", "expected an IPv4 address"),
        ("/ip6/1.2.3.4/tcp/1", "expected an IPv6 address"),
        ("/ip6/fe80::1%eth0/tcp/1", "without a zone"),
        ("/ip4/0.0.0.0/tcp/1", "means every interface"),
        ("/ip4/224.0.0.1/tcp/1", "multicast"),
        ("/dns4/a..b/tcp/1", "expected a host name"),
        ("/dns4/-a/tcp/1", "expected a host name"),
        ("/dns4//tcp/1", "expected a host name"),
        ("/ip4/1.2.3.4", "expected /tcp/PORT"),
        ("/ip4/1.2.3.4/tcp", "expected a port (1 to 65535) after /tcp/, found ''"),
        ("/ip4/1.2.3.4/tcp/x", "found 'x'"),
        ("/ip4/1.2.3.4/tcp/65536", "expected a port"),
        ("/ip4/1.2.3.4/tcp/080", "expected a port"),
        ("/ip4/1.2.3.4/tcp/0", "port 0 means any free port"),
        ("/ip4/1.2.3.4/tcp/١", "expected a port"),
        ("/ip4/1.2.3.4/udp/1", "expected /tcp/PORT, /tcp/PORT/ws or /udp/PORT/quic-v1"),
        ("/ip4/1.2.3.4/tcp/1/quic", "expected /tcp/PORT"),
        ("/ip4/1.2.3.4/tcp/1/http", "'http' is not a transport"),
        ("/ip4/1.2.3.4/tcp/1/", "'' is not a transport"),
        ("/ip4/1.2.3.4/tcp/1/p2p", "expected a peer id after /p2p/"),
        ("/ip4/1.2.3.4/tcp/1/p2p/12D3KooW", "expected a peer id (12D3KooW…, 52 characters) after /p2p/"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{RSA}", "RSA"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/x", "expected nothing after the peer id, found 'x'"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/p2p/{PEER}", "expected nothing after the peer id"),
        (f"/ip4/1.2.3.4/tcp/1/p2p-circuit/p2p/{PEER}", "expected the relay's /p2p/ID"),
        ("/dns4/" + "a" * 300 + "/tcp/1", "at most 256 characters"),
    ],
)
def test_malformed_multiaddresses(text: str, expected: str) -> None:
    with pytest.raises(AddressError) as caught:
        Multiaddr.parse(text)
    assert expected in str(caught.value)
    assert not is_multiaddr(text)


def test_listening() -> None:
    assert Multiaddr.parse("/ip4/0.0.0.0/tcp/0", listen=True).port == 0
    assert Multiaddr.parse("/ip6/::/tcp/1", listen=True).name == "::"


def test_run_address() -> None:
    peers = [f"/ip4/127.0.0.1/tcp/31337/p2p/{PEER}", f"/dns4/boot/tcp/1/p2p/{RSA}/p2p-circuit/p2p/{PEER}"]
    address = RunAddress(RUN, peers)
    text = str(address)
    assert text == f"atoll:{RUN.hex()}@{peers[0]},{peers[1]}"
    assert shlex.quote(text) == text
    assert RunAddress.parse(text) == address
    assert RunAddress.parse(f"  {text}\n") == address
    assert RunAddress.parse(text.replace(RUN.hex(), RUN.hex().upper())) == address
    assert address.peers == tuple(peers)
    assert address.peer_ids == (PEER,)
    assert hash(address) == hash(RunAddress.parse(text))
    assert RunAddress(RUN, peers * 3) == address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "found nothing"),
        ("atol:xx", "expected it to begin with 'atoll:'"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}", "is a multiaddress; expected atoll:<run id>@<multiaddress>"),
        (f"atoll:{RUN.hex()}", "there is no '@'"),
        (f"atoll:{RUN.hex()[:-1]}@/ip4/1.2.3.4/tcp/1/p2p/{PEER}", "64 hex digits before '@', found 63 characters"),
        (f"atoll:{'z' * 64}@/ip4/1.2.3.4/tcp/1/p2p/{PEER}", "64 hex digits"),
        (f"atoll:{RUN.hex()}@", "a slash at the beginning"),
        (f"atoll:{RUN.hex()}@/ip4/1.2.3.4/tcp/1", "expected the peer's id at the end"),
        (f"atoll:{RUN.hex()}@/ip4/1.2.3.4/tcp/1/p2p/{PEER[:-1]}", "expected a peer id"),
        (f"atoll:{RUN.hex()}@/ip4/1.2.3.4/tcp/1/p2p/{PEER},", "a slash at the beginning"),
        (f"atoll:{RUN.hex()}@/ip4/1.2.3.4/tcp/1/p2p/{RSA}/p2p-circuit", "expected the peer's id at the end"),
        ("atoll:" + "x" * 9000, "at most 8192 characters"),
    ],
)
def test_malformed_run_addresses(text: str, expected: str) -> None:
    with pytest.raises(AddressError) as caught:
        RunAddress.parse(text)
    assert expected in str(caught.value)
    assert caught.value.exit_code == 4


def test_bounds() -> None:
    with pytest.raises(AddressError, match="32 bytes"):
        RunAddress(b"x", [f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}"])
    with pytest.raises(AddressError, match="at least one"):
        RunAddress(RUN, [])
    many = [f"/ip4/1.2.3.4/tcp/{i + 1}/p2p/{PEER}" for i in range(MAX_PEERS + 1)]
    with pytest.raises(AddressError, match=f"at most {MAX_PEERS}"):
        RunAddress(RUN, many)
    assert RunAddress.parse(str(RunAddress(RUN, many[:-1]))).peers == tuple(many[:-1])


@given(st.text(max_size=200))
@example("atoll:" + RUN.hex() + "@/ip4/1.2.3.4/tcp/1/p2p/" + "1" * 200)
def test_any_text_is_read_or_refused(text: str) -> None:
    for candidate in (text, "atoll:" + text, f"atoll:{RUN.hex()}@" + text, f"atoll:{RUN.hex()}@/ip4/1.2.3.4/" + text):
        try:
            address = RunAddress.parse(candidate)
        except AddressError as error:
            message = str(error)
        else:
            message = ""
            assert RunAddress.parse(str(address)) == address
        assert "\n" not in message


@given(st.integers(0, 200), st.characters())
def test_one_changed_character(at: int, letter: str) -> None:
    good = f"atoll:{RUN.hex()}@/ip4/127.0.0.1/tcp/31337/p2p/{PEER}"
    at %= len(good)
    try:
        address = RunAddress.parse(good[:at] + letter + good[at + 1 :])
    except AddressError:
        return
    assert RunAddress.parse(str(address)) == address
