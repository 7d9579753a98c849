"""A flood of refusals is counted, not written down."""

from __future__ import annotations

from typing import Any

from atoll.protocol.refusals import MAX_PEERS, OF_A_PEER, OF_ALL, WINDOW, Refusals


class Log:
    def __init__(self) -> None:
        self.now = 100.0
        self.written: list[tuple[str, dict[str, Any]]] = []
        self.refusals = Refusals(self.write, lambda: self.now)

    def write(self, event: str, /, **fields: Any) -> None:
        self.written.append((event, fields))


def test_one_peer_has_its_lines_a_minute_and_the_rest_is_counted() -> None:
    log = Log()
    for number in range(1000):
        log.refusals("refused", peer="loud", reason=str(number))
    log.refusals("refused", peer="quiet", reason="once")
    log.refusals("commit", round=1)
    assert [fields["reason"] for _, fields in log.written[:-2]] == [str(number) for number in range(OF_A_PEER)]
    assert log.written[-2:] == [("refused", {"peer": "quiet", "reason": "once"}), ("commit", {"round": 1})]
    log.now += WINDOW
    log.refusals("refused", peer="loud", reason="again")
    assert log.written[-1] == ("refused", {"peer": "loud", "reason": "again", "unlogged": 1000 - OF_A_PEER})


def test_many_peers_share_a_bound_and_little_memory() -> None:
    log = Log()
    for number in range(3 * MAX_PEERS):
        log.refusals("refused", peer=f"p{number}", reason="no")
    assert len(log.written) == OF_ALL
    assert len(log.refusals._peers) == MAX_PEERS
    log.now += WINDOW
    log.refusals("refused", peer="another", reason="no")
    assert len(log.written) == OF_ALL + 1
