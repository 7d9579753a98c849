"""Checkpoints for people: the global parameters as safetensors beside a small metadata file.

These are exports, for generating text and for other tools. What a peer restarts from is the protocol's own store
(:mod:`atoll.protocol.store`).
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from atoll.protocol.disk import replace_file
from atoll.protocol.errors import CheckpointError, ManifestError, ResourceError, why_unreadable

from .config import ModelConfig
from .specs import tensor_specs

FORMAT = 1
KEEP = 3


@dataclass(frozen=True)
class Metadata:
    """What stands beside the parameters."""

    run: str
    """Run id, hex."""
    name: str
    """The run's name, for people."""
    model: dict[str, Any]
    """The ``[model]`` table."""
    round: int
    outer_step: int
    tokens: int
    digest: str
    """State digest at that commit, hex."""


@dataclass(frozen=True)
class Checkpoint:
    params: NDArray[np.float32]
    """Flat, in the order of the model's layout."""
    model: ModelConfig
    metadata: Metadata


def save(folder: Path, params: NDArray[np.float32], metadata: Metadata, keep: int = KEEP) -> Path:
    """Write ``step-N.safetensors`` and ``step-N.json`` into ``folder``; returns the former's path.

    Each file appears whole or not at all, the metadata last, so a checkpoint is there when its metadata is. All but
    the ``keep`` newest are removed. Raises :class:`ResourceError` when the disk is full or not writable.
    """
    from safetensors.numpy import save as to_bytes

    model = ModelConfig.from_table(metadata.model)
    tensors: dict[str, NDArray[np.float32]] = {}
    at = 0
    for spec in tensor_specs(model):
        tensors[spec.name] = params[at : at + spec.size].reshape(spec.shape)
        at += spec.size
    if at != params.size:
        raise ValueError(f"expected {at} parameters for this model, got {params.size}")
    data = to_bytes(tensors, {"run": metadata.run, "outer_step": str(metadata.outer_step)})
    record = {"format": FORMAT, **asdict(metadata), "bytes": len(data), "blake3": blake3(data).hexdigest()}
    target = folder / f"step-{metadata.outer_step:08d}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(target, data, durable=True)
        replace_file(target.with_suffix(".json"), json.dumps(record, indent=2).encode() + b"\n", durable=True)
        for old in _steps(folder)[: -max(keep, 1)]:
            # the metadata first: without it the rest counts as nothing
            old.unlink(missing_ok=True)
            old.with_suffix(".safetensors").unlink(missing_ok=True)
    except OSError as error:
        raise ResourceError(f"cannot write the checkpoint {target}: {error.strerror}; free or choose a place") from None
    return target


def load(path: Path, *, run: str | None = None, model: ModelConfig | None = None) -> Checkpoint:
    """The checkpoint at ``path``: a folder (its newest), a ``.safetensors`` file or its ``.json``.

    Raises :class:`CheckpointError` when it is missing, truncated or changed, of another run than ``run``, or of another
    model than ``model``.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load as from_bytes

    if path.is_dir():
        steps = _steps(path)
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {path}; expected step-….safetensors and step-….json")
        path = steps[-1]
    elif not path.with_suffix(".safetensors").exists():
        raise CheckpointError(
            f"there is no checkpoint at {path}; give a .safetensors file that atoll wrote, or the folder it lies in"
        )
    record, data = _read(path.with_suffix(".json")), _read(path.with_suffix(".safetensors"))
    path = path.with_suffix(".safetensors")
    try:
        fields = json.loads(record)
        form = fields.pop("format")
        size, digest = fields.pop("bytes"), fields.pop("blake3")
        metadata = Metadata(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.with_suffix('.json')} is no metadata of a checkpoint: {error!r}") from None
    if form != FORMAT:
        raise CheckpointError(f"{path} has format {form}, this atoll reads {FORMAT}; use the version that wrote it")
    other = _run_of(data)
    if other is not None and other != metadata.run:
        raise CheckpointError(
            f"{path} is of run {other[:16]}…, but the metadata beside it of run {metadata.run[:16]}…; "
            "put the files of one checkpoint together again, or use another one"
        )
    if len(data) > size:
        raise CheckpointError(f"{path} has {len(data)} bytes, expected {size}: it is another file; use another one")
    if len(data) != size:
        raise CheckpointError(f"{path} has {len(data)} bytes, expected {size}: it is truncated; use another one")
    if blake3(data).hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: its bytes do not match its metadata; use another one")
    if run is not None and metadata.run != run:
        raise CheckpointError(f"{path} is of run {metadata.run[:16]}…, expected {run[:16]}…; give one of this run")
    try:
        own = ModelConfig.from_table(metadata.model)
    except ManifestError as error:
        raise CheckpointError(f"{path} is of a model that this atoll does not know: {error}") from None
    specs, wanted = tensor_specs(own), tensor_specs(model) if model is not None else None
    if wanted is not None and wanted != specs:
        raise CheckpointError(f"{path} is of another model ({_short(own)}), expected {_short(model or own)}")
    try:
        tensors = from_bytes(data)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from None
    if {n: (t.shape, t.dtype) for n, t in tensors.items()} != {s.name: (s.shape, np.dtype("f4")) for s in specs}:
        raise CheckpointError(f"{path} holds other tensors than its model ({_short(own)}) has")
    return Checkpoint(np.concatenate([tensors[s.name].ravel() for s in specs]), own, metadata)


def keep(path: Path, folder: Path) -> Path | None:
    """Keep the checkpoint at ``path`` in ``folder``, which whoever writes it won't tidy: as links, or as copies where
    there are none. Both files or neither: None when the checkpoint is gone already, or there is no room."""
    kept = folder / path.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix in (".safetensors", ".json"):
            source, target = path.with_suffix(suffix), kept.with_suffix(suffix)
            target.unlink(missing_ok=True)
            try:
                os.link(source, target)
            except OSError:
                shutil.copyfile(source, target)
    except OSError:
        for suffix in (".json", ".safetensors"):
            kept.with_suffix(suffix).unlink(missing_ok=True)
        return None
    return kept


def _run_of(data: bytes) -> str | None:
    """The run id that stands in the header of a safetensors file of ours; None when it cannot be read."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        run = header["__metadata__"]["run"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return run if isinstance(run, str) else None


def _steps(folder: Path) -> list[Path]:
    """The metadata files of whole checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step-*.json") if p.with_suffix(".safetensors").exists())


def _short(model: ModelConfig) -> str:
    return f"width {model.width}, {model.layers} layers, context {model.context}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{why_unreadable(path, error)}; a checkpoint is step-….safetensors and step-….json beside it"
        ) from None
