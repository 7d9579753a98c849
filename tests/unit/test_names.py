"""The public name of a node that was given none."""

from __future__ import annotations

from atoll.node.names import public_name
from atoll.protocol.identity import Ed25519Signer
from atoll.protocol.records import check_name


def test_it_follows_from_the_peer_id_alone_and_fits_into_a_record() -> None:
    peers = [Ed25519Signer.from_seed(bytes([i]) * 32).peer_id for i in range(40)]
    names = [public_name(peer) for peer in peers]
    assert names == [public_name(peer) for peer in peers]
    assert len(set(names)) > 30
    assert all(check_name(name) == name and name.count("-") == 1 for name in names)
