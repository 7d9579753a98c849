from __future__ import annotations

from atoll.protocol.digest import blake3_digest


def test_known_answer_of_the_empty_string() -> None:
    known = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert blake3_digest().hex() == known
    assert blake3_digest(b"").hex() == known


def test_parts_are_one_string_and_any_buffer_will_do() -> None:
    assert blake3_digest(b"ab", bytearray(b"c"), memoryview(b"xde")[1:]) == blake3_digest(b"abcde")
