"""Sources, split and pin of the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.node.config import DataConfig, ModelConfig
from atoll.node.data import load, pin, stdlib
from atoll.node.data.holdout import HELD_OUT, LARGEST, SMALLEST, File, split
from atoll.node.evaluate import evaluate
from atoll.node.specs import tensor_specs
from atoll.protocol.errors import DataError
from atoll.protocol.theta0 import theta0


def test_stdlib_is_split_by_file() -> None:
    files = stdlib.read()
    names = [f.name for f in files]
    assert len(names) == len(set(names)) > 400
    assert not any(part in {"test", "tests", "encodings", "site-packages"} for n in names for part in n.split("/"))
    corpus = load(pin(DataConfig()), 64)
    assert len(corpus.held_out) == HELD_OUT >= 50
    sizes = {f.name: len(f.data) for f in files}
    assert all(SMALLEST <= sizes[n] <= LARGEST for n in corpus.held_out)
    assert len(corpus.validation) == sum(sizes[n] + 1 for n in corpus.held_out)
    assert len(corpus.train) + len(corpus.validation) == sum(sizes.values()) + len(sizes)
    held_out = next(f for f in files if f.name == corpus.held_out[0])
    assert held_out.data in corpus.validation.tobytes()
    assert held_out.data not in corpus.train.tobytes()


def test_the_split_ignores_contents_and_order() -> None:
    files = [File(f"{i}.txt", bytes([97 + i % 20]) * 2000) for i in range(300)]
    other = [File(f.name, b"z" * len(f.data)) for f in reversed(files)]
    assert split(files)[2] == split(other)[2] != ()


def test_a_mismatch_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = pin(DataConfig()).model_copy(update={"python": "3.99.1", "count": 7, "files": "0" * 64})
    with pytest.raises(
        DataError, match=r"pinned 7 files .*Python 3\.99\.1.*found .*run this node with Python 3\.99\.1"
    ):
        load(pinned, 64)
    same = pin(DataConfig())
    files = stdlib.read()
    monkeypatch.setattr(stdlib, "read", lambda: files[1:])
    with pytest.raises(DataError, match="changed or repackaged"):
        load(same, 64)


def test_a_python_without_sources_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stdlib, "folder", lambda: tmp_path)
    with pytest.raises(DataError, match="no library sources"):
        pin(DataConfig())


def text(path: Path) -> DataConfig:
    return DataConfig(source="text", path=str(path))


def test_a_file_of_text_holds_out_its_end(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(32, 127)) * 100)
    corpus = load(pin(text(file)), 64)
    assert corpus.held_out == ()
    assert corpus.train.tobytes() + corpus.validation.tobytes() == file.read_bytes() + b"\0"
    assert len(corpus.validation) == 9501 // 20


def test_a_folder_of_text_skips_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.md").write_text("x" * 3000)
    (tmp_path / "binary").write_bytes(b"ab\0cd")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b.md")
    assert pin(text(tmp_path)).count == 1
    pinned = pin(text(tmp_path))
    (tmp_path / "a" / "b.md").write_text("y" * 3000)
    with pytest.raises(DataError, match="get the very files"):
        load(pinned, 8)


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder or file"):
        pin(text(tmp_path / "missing"))
    with pytest.raises(DataError, match="no text in"):
        pin(text(tmp_path))
    with pytest.raises(DataError, match="needs path"):
        pin(DataConfig(source="text"))
    (tmp_path / "short").write_text("only a few bytes, fewer than two sequences")
    with pytest.raises(DataError, match="fewer than one sequence of 65"):
        load(text(tmp_path), 64)
    (tmp_path / "short").write_text("x")
    with pytest.raises(DataError, match="too little text"):
        pin(text(tmp_path))


def test_every_byte_but_the_first_is_scored_once(tmp_path: Path) -> None:
    """With all logits equal each byte costs ln 256, whatever the windows; and the score is that of the model."""
    file = tmp_path / "t"
    file.write_bytes(b"some text to be scored, again and again. " * 300)
    model = ModelConfig.from_table({"width": 16, "heads": 2, "kv_heads": 2, "ffn": 16, "layers": 1, "context": 24})
    params = theta0(0, tensor_specs(model))
    params[:] = 0
    assert evaluate(params, model, text(file)) == pytest.approx(np.log(256), rel=1e-5)
