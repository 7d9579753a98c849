"""What a manifest's author need not write: derived fields, and what is usual for the rest.

``atoll manifest new`` and ``atoll swarm`` make manifests here, ``manifest sign`` completes hand-written ones, and
``manifest check`` compares what stands in one with what it must be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.protocol.errors import DataError, ManifestError
from atoll.protocol.fragments import make_layout
from atoll.protocol.layout import ChunkLayout
from atoll.protocol.lowrank import largest_rank
from atoll.protocol.manifest import PROTOCOL, Manifest, suggested_chunk, with_version

from .config import DataConfig, InnerConfig, ModelConfig
from .presets import DEFAULT_PRESET

CAP_ROUNDS = 8
"""A contribution weighs at most the tokens of this many rounds: who returns after a long time alone does not swamp
the average."""
SQUARED_CAP_ROUNDS = 3
"""… where weights go by the square of the tokens, so that the most is nine usual ones, not 64."""
LEASE_ROUNDS = 2
"""A newcomer is leased the samples of this many rounds."""
LOW_RANK = 8
"""The rank of "lowrank" where none is given; as high as the model's matrices allow, if that is less."""
LOW_RANK_FEEDBACK = 0.9
"""The residual of "lowrank" is many rounds old; let it fade (docs/decisions-codecs.md)."""
LEASE_GROWTH = 4
"""The largest lease, in first leases: four devices' worth of speed between slowest and fastest, or a lost round."""


@dataclass(frozen=True)
class Tables:
    """The node's tables of a manifest, typed."""

    model: ModelConfig
    data: DataConfig
    inner: InnerConfig

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Tables:
        """Raises :class:`ManifestError`, naming what is wrong in all three in one line."""
        found: list[Any] = []
        problems = []
        for name, kind in (("model", ModelConfig), ("data", DataConfig), ("inner", InnerConfig)):
            table = raw.get(name, {})
            if not isinstance(table, Mapping):
                problems.append(f"{name}: expected a table, found {table!r}")
                continue
            try:
                found.append(kind.from_table(table))
            except ManifestError as error:
                problems.append(str(error))
        if problems:
            raise ManifestError("; ".join(problems))
        return cls(*found)


def new_manifest(
    name: str = "demo",
    *,
    preset: str = DEFAULT_PRESET,
    data: str | Path = "stdlib",
    optimizer: str | None = None,
    lr: float | None = None,
    batch: int | None = None,
    seed: int | None = None,
    inner_steps: int | None = None,
    overlap: int | None = None,
    fragments: int | None = None,
    by: str | None = None,
    every: float | None = None,
    quorum: int | None = None,
    average: str | None = None,
    weights: str | None = None,
    codec: str | None = None,
    rank: int | None = None,
    rounds: int | None = None,
    model: Mapping[str, Any] | None = None,
    inner: Mapping[str, Any] | None = None,
    **sections: Mapping[str, Any],
) -> Manifest:
    """A complete, unsigned manifest. What is left out is as usual.

    data: ``"stdlib"``, or a folder or file of text.
    lr: peak rate of the chosen optimizer (Muon's rate of the matrices, or AdamW's).
    model, inner, sections (round, outer, codec, state, budget, access): further fields of these tables.

    Raises:
        ManifestError: a field is wrong.
        DataError: there is no usable text.
    """
    source = {"source": "stdlib"} if str(data) == "stdlib" else {"source": "text", "path": str(data)}
    rates = dict(inner or {})
    optimizer = optimizer if optimizer is not None else rates.get("optimizer")
    raw: dict[str, Any] = {
        "name": name,
        "model": _given(preset=preset, seed=seed) | dict(model or {}),
        "data": source,
        "inner": rates | _given(optimizer=optimizer, batch=batch, **{_rate(optimizer): lr}),
        "round": _given(
            inner_steps=inner_steps,
            overlap=overlap,
            fragments=fragments,
            by=by,
            every=every,
            quorum=quorum,
            average=average,
            weights=weights,
        ),
        "codec": _given(name=codec, rank=rank),
        "budget": _given(rounds=rounds),
    }
    for key, values in sections.items():
        raw[key] = {**raw.get(key, {}), **values}
    return Manifest.from_dict(complete(raw))


def complete(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` with every field that is missing: derived from the others, or as usual. What is there stays.

    ``name`` is never made up. Raises as :func:`new_manifest`; fields of the protocol's own tables are not validated
    here, and what depends on a wrong one is left out.
    """
    full: dict[str, Any] = {"protocol": PROTOCOL, **raw}
    tables = Tables.of(full)
    if tables.data.files is None:
        from .data import pin

        tables = Tables(tables.model, pin(tables.data), tables.inner)
    full["model"] = {**tables.model.to_table(), **full.get("model", {})}
    full["data"] = {**tables.data.to_table(), **full.get("data", {})}
    full["inner"] = {**tables.inner.to_table(), **full.get("inner", {})}
    for section, usual in Manifest.SUGGESTED.items():
        if isinstance(full.setdefault(section, {}), Mapping):
            full[section] = {**usual, **full[section]}
    given = raw.get("outer", {})
    if isinstance(given, Mapping) and given.get("optimizer") == "sgd" and "momentum" not in given:
        full["outer"]["momentum"] = 0.0
    given = raw.get("round", {})
    if isinstance(given, Mapping) and given.get("by", "steps") != "steps" and "grace" not in given:
        full["round"]["grace"] = 0.0
    given = raw.get("codec", {})
    if isinstance(given, Mapping) and given.get("name") == "lowrank" and "error_feedback" not in given:
        full["codec"]["error_feedback"] = LOW_RANK_FEEDBACK
    if isinstance(full["codec"], Mapping):
        full["codec"] = with_version(full["codec"])
    if isinstance(full["round"], dict):
        _complete_round(full["round"], tables)
    if isinstance(full["state"], dict):
        _complete_state(full["state"], tables.model, full["round"], full["codec"])
    return full


def _complete_round(section: dict[str, Any], tables: Tables) -> None:
    steps = section["inner_steps"]
    if isinstance(steps, int) and steps > 0:
        units = steps * tables.inner.batch
        rounds = SQUARED_CAP_ROUNDS if section.get("weights") == "tokens2/steps" else CAP_ROUNDS
        section.setdefault("weight_cap", rounds * units * tables.model.context)
        section.setdefault("first_lease", LEASE_ROUNDS * units)
    first = section.get("first_lease")
    if isinstance(first, int):
        section.setdefault("max_lease", LEASE_GROWTH * first)


def _complete_state(section: dict[str, Any], model: ModelConfig, rules: Any, codec: Any) -> None:
    from .specs import count_parameters, embeddings, layer_sizes, tensor_columns, tensor_specs

    parameters = count_parameters(model)
    several = dict(rules) if isinstance(rules, Mapping) else {}
    packed = codec if isinstance(codec, dict) else {}
    factors, radial = packed.get("name") == "lowrank", several.get("average") == "radial"
    shapes = [(spec.size // spec.shape[-1], spec.shape[-1]) for spec in tensor_specs(model)]
    section.setdefault("parameters", parameters)
    largest = max(m * n for m, n in shapes) if factors else 0
    section.setdefault("chunk", suggested_chunk(parameters, several.get("fragments"), largest))
    if several.get("fragments") == 1 and not factors and not radial:
        section.setdefault("layers", ())
    elif not section.get("layers"):
        section["layers"] = layer_sizes(model)
    section.setdefault("embeddings", embeddings(model) if radial else ())
    if not factors:
        section.setdefault("columns", ())
    else:
        if not section.get("columns"):
            section["columns"] = tensor_columns(model)
        if not packed.get("rank"):
            packed["rank"] = max(min(LOW_RANK, largest_rank(shapes)), 1)
    chunk = section["chunk"]
    if "theta0" not in section and isinstance(chunk, int) and chunk > 0:
        layout = ChunkLayout(parameters, chunk)
        # Where they do not fit, the manifest is refused for that, and not for the digest.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            layout = make_layout(
                parameters, chunk, section["layers"], several["fragments"], several["packing"],
                section["columns"] if factors else (), packed["rank"] if factors else 0,
            )  # fmt: skip
        section["theta0"] = initial_digest(model, layout)


def initial_digest(model: ModelConfig, layout: ChunkLayout) -> str:
    """Digest (hex) of the state that a run of ``model`` starts from. Takes eight bytes of memory a parameter."""
    from atoll.protocol.state import GlobalState
    from atoll.protocol.theta0 import theta0

    from .specs import tensor_specs

    params = theta0(model.seed, tensor_specs(model))
    return GlobalState.fresh(layout, params).digest().hex()


def verify(manifest: Manifest) -> Tables:
    """Check what the protocol cannot: the node's tables, and the fields derived from them.

    Raises :class:`ManifestError` naming every contradiction. Does not look at the training data (:func:`data_here`).
    """
    from .specs import count_parameters, embeddings, layer_sizes, tensor_columns

    tables = Tables.of(manifest.model_dump())
    problems = []
    parameters = count_parameters(tables.model)
    state, round_ = manifest.state, manifest.round
    if state.parameters != parameters:
        problems.append(f"state.parameters: the model has {parameters}, found {state.parameters}")
    elif state.layers and state.layers != layer_sizes(tables.model):
        problems.append("state.layers: these are not the sizes of the model's tensors; delete the line and sign again")
    elif state.columns and state.columns != tensor_columns(tables.model):
        problems.append("state.columns: these are not the model's; delete the line and sign again")
    else:
        digest = initial_digest(tables.model, manifest.layout)
        if state.theta0 != digest:
            problems.append(f"state.theta0: the model's initial state has the digest {digest}, found {state.theta0}")
    if round_.average == "radial" and state.embeddings != embeddings(tables.model):
        problems.append(
            f"state.embeddings: those of the model are {list(embeddings(tables.model))}, found "
            f"{list(state.embeddings)}; delete the line and sign again"
        )
    units = round_.inner_steps * tables.inner.batch
    ahead = units + round_.overlap * tables.inner.batch
    if round_.max_lease < units:
        problems.append(
            f"round.max_lease = {round_.max_lease} is below inner_steps × batch = {units}: no peer could ever finish "
            "its inner steps"
        )
    elif round_.max_lease < ahead:
        problems.append(
            f"round.max_lease = {round_.max_lease} is below (inner_steps + overlap) × batch = {ahead}: no peer would "
            "have samples for the steps of the overlap"
        )
    if round_.first_lease // 2 < tables.inner.batch:
        problems.append(
            f"round.first_lease = {round_.first_lease} is below two steps of batch = {tables.inner.batch} samples: a "
            "newcomer might never take one"
        )
    if tables.data.files is None:
        problems.append("data.files: missing; expected the hash of the files, for all peers must train on the same")
    if problems:
        raise ManifestError("; ".join(problems))
    return tables


def data_here(config: DataConfig, context: int) -> str | None:
    """Why this machine could not train on the pinned data; None when it could."""
    from .data import load

    try:
        load(config, context)
    except DataError as error:
        return str(error)
    return None


def _rate(optimizer: str | None) -> str:
    return "adamw_lr" if optimizer in ("adamw", "adamw8bit") else "lr"


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
