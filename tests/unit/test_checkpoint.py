"""Exported checkpoints."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.node.checkpoint import Metadata, load, save
from atoll.node.config import ModelConfig
from atoll.node.specs import tensor_specs
from atoll.protocol.errors import CheckpointError, ResourceError
from atoll.protocol.theta0 import theta0

TABLE = {"width": 16, "heads": 2, "kv_heads": 1, "ffn": 16, "layers": 1, "context": 8}
MODEL = ModelConfig.from_table(TABLE)
PARAMS = theta0(3, tensor_specs(MODEL))
META = Metadata("ab" * 32, "demo", MODEL.to_table(), 12, 10, 12345, "cd" * 32)


def test_round_trip_by_folder_file_and_metadata(tmp_path: Path) -> None:
    path = save(tmp_path, PARAMS, META)
    for where in (tmp_path, path, path.with_suffix(".json")):
        found = load(where, run=META.run, model=MODEL)
        assert found.params.tobytes() == PARAMS.tobytes()
        assert (found.metadata, found.model) == (META, MODEL)
    assert sorted(os.listdir(tmp_path)) == ["step-00000010.json", "step-00000010.safetensors"]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(6):
        save(tmp_path, PARAMS * np.float32(step), replace(META, outer_step=step), keep=2)
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == [f"step-0000000{s}.safetensors" for s in (4, 5)]
    assert load(tmp_path).metadata.outer_step == 5


def test_other_tools_read_it(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    tensors = load_file(save(tmp_path, PARAMS, META))
    assert tensors["layers.0.qkv"].shape == (32, 16)


def test_truncated_damaged_and_missing_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, PARAMS, META)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match="truncated"):
        load(path)
    path.write_bytes(whole[:-5] + b"12345")
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)
    path.write_bytes(whole)
    path.with_suffix(".json").write_text("{")
    with pytest.raises(CheckpointError, match="no metadata"):
        load(path)
    path.with_suffix(".json").write_text("[]")
    with pytest.raises(CheckpointError, match="no metadata"):
        load(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load(tmp_path / "step-1.safetensors")


def test_another_run_model_or_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, PARAMS, META)
    with pytest.raises(CheckpointError, match="is of run"):
        load(path, run="ef" * 32)
    with pytest.raises(CheckpointError, match="another model"):
        load(path, model=ModelConfig.from_table({**TABLE, "ffn": 24}))
    record = path.with_suffix(".json")
    fields = json.loads(record.read_text())
    record.write_text(json.dumps(fields | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        load(path)
    record.write_text(json.dumps(fields | {"model": {"width": 3}}))
    with pytest.raises(CheckpointError, match="does not know"):
        load(path)


def test_the_files_of_two_runs_are_told_apart(tmp_path: Path) -> None:
    path = save(tmp_path / "a", PARAMS, META)
    other = save(tmp_path / "b", PARAMS, replace(META, run="ef" * 32))
    path.write_bytes(other.read_bytes())
    with pytest.raises(CheckpointError, match="is of run efefefefefefefef…, but the metadata beside it of run abab"):
        load(path)


def test_a_disk_that_takes_nothing_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, PARAMS, META)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left"):
        save(tmp_path, PARAMS, replace(META, outer_step=11))
    monkeypatch.undo()
    assert load(tmp_path).metadata.outer_step == 10
    assert len(os.listdir(tmp_path)) == 2
