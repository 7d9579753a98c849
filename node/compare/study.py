"""Rows of a comparison: which manifest, under which circumstances, compared with what; and the runs they take.

A study file is TOML::

    base = "run.toml"                 # the manifest that rows change; default: the first one of the command line
    tokens = 1_000_000                # of all peers of a reference run; these three and peers are defaults that
    seeds = 1                         # the command line overrides
    margin = 1.0                      # percent

    [manifest.round]                  # changes to the manifest in every row
    inner_steps = 30
    [scenario]                        # and the circumstances of every row (see Scenario)
    peers = 4

    [[row]]
    name = "int4"
    against = "float32"               # default: the first row; "" for none
    margin = 1.0
    seeds = 3
    manifest = { codec = { name = "int4" } }
    scenario = { lost = 0.5 }
    [row.sweep]                       # tried on one seed of their own, the best is used
    "outer.lr" = [0.4, 0.7, 1.0]
    "scenario.rate" = [0.5, 1.0]
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from atoll.node.run_defaults import complete
from atoll.protocol.errors import ConfigError, UsageError, why_unreadable
from atoll.protocol.manifest import LATER, Manifest

from .lowrank import largest_rank
from .scenario import Scenario

SWEEP_SEED = 1_000
"""The seed that sweeps are made on; no row is judged by it."""
AA_SEED = 1_000_003
"""Added to the seed of the text in the A/A row."""
DERIVED = (
    ("round", "weight_cap"),
    ("round", "first_lease"),
    ("round", "max_lease"),
    ("codec", "version"),
    ("state", "parameters"),
    ("state", "chunk"),
    ("state", "layers"),
    ("state", "embeddings"),
    ("state", "columns"),
    ("state", "theta0"),
)
"""Fields of a manifest that follow from others."""
WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "data": ("path", "python", "count"),
    "round": ("silence", "grace", "first_lease", "max_lease"),
    "state": ("checkpoint_every",),
}
"""Fields of a manifest that the simulation does not look at; real nodes do at those of rounds."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    manifest: Manifest
    scenario: Scenario
    against: str | None = None
    """Name of the row it is compared with."""
    margin: float | None = None
    """Percent; None: no verdict is asked for."""
    seeds: int | None = None
    tokens: int | None = None
    sweep: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    chosen: Mapping[str, float] = field(default_factory=dict)
    """What the sweep has found."""

    def variants(self) -> list[Row]:
        """A row for each point of the sweep; none without one."""
        if not self.sweep or self.chosen:
            return []
        names = list(self.sweep)
        return [self.at(dict(zip(names, values, strict=True))) for values in itertools.product(*self.sweep.values())]

    def at(self, point: Mapping[str, float]) -> Row:
        """The row with these values of what is swept."""
        changes: dict[str, dict[str, Any]] = {}
        for key, value in point.items():
            table, _, name = key.partition(".")
            changes.setdefault(table, {})[name] = value
        scenario = changes.pop("scenario", {})
        return replace(
            self,
            manifest=changed(self.manifest, changes) if changes else self.manifest,
            scenario=Scenario.of({**self.scenario.model_dump(), **scenario}, f"row {self.name!r}"),
            chosen=dict(point),
        )


@dataclass(frozen=True)
class Study:
    rows: tuple[Row, ...]
    tokens: int | None = None
    seeds: int | None = None


def changed(manifest: Manifest, changes: Mapping[str, Any]) -> Manifest:
    """``manifest`` with some fields changed, unsigned; what had followed from others follows from the new ones.

    Raises :class:`ManifestError`.
    """
    raw = manifest.model_dump(exclude={"owner", "signature"})
    bare = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    for section, key in DERIVED:
        del bare[section][key]
    usual = complete(bare)
    for section, key in DERIVED:
        if raw[section][key] != usual[section][key]:
            bare[section][key] = raw[section][key]
    for key, value in changes.items():
        bare[key] = {**bare[key], **value} if isinstance(value, Mapping) and key in bare else value
    return Manifest.from_dict(complete(bare))


def read_study(path: Path, base: Manifest | None, defaults: Mapping[str, Any]) -> Study:
    """The rows of a study file.

    base: the manifest to change, where the file names none. defaults: of scenarios. Raises :class:`ConfigError` (a
    :class:`ManifestError` for what is wrong in a manifest) with the file in front.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{why_unreadable(path, error)}; expected a study, a TOML file (docs/compare.md)") from None
    except (UnicodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None
    _known(raw, ("base", "tokens", "seeds", "margin", "manifest", "scenario", "row"), str(path))
    if "base" in raw:
        base = Manifest.load(path.parent / _typed(raw["base"], str, f"{path}: base"))
    if base is None:
        from atoll.node.run_defaults import new_manifest

        base = new_manifest("compare")
    try:
        common = changed(base, _typed(raw.get("manifest", {}), dict, "manifest"))
        tables = _typed(raw.get("row", []), list, "row")
        if not tables:
            raise ConfigError("a study needs at least one [[row]]")
        first = str(tables[0].get("name", "")) if isinstance(tables[0], dict) else ""
        rows = tuple(_row(table, number, common, raw, first, defaults) for number, table in enumerate(tables, 1))
        check_rows(rows)
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from None
    return Study(rows, _whole(raw.get("tokens"), "tokens"), _whole(raw.get("seeds"), "seeds"))


def _row(
    table: Any, number: int, base: Manifest, study: Mapping[str, Any], first: str, defaults: Mapping[str, Any]
) -> Row:
    where = f"row {number}"
    table = _typed(table, dict, where)
    _known(table, ("name", "against", "margin", "seeds", "tokens", "manifest", "scenario", "sweep"), where)
    name = _typed(table.get("name"), str, f"{where}: name")
    where = f"row {name!r}"
    against = _typed(table.get("against", first if name != first else ""), str, f"{where}: against")
    margin = table.get("margin", study.get("margin") if against else None)
    if margin is not None and not (isinstance(margin, int | float) and 0 < margin < 1000):
        raise ConfigError(f"{where}: margin: expected a percentage above 0, found {margin!r}")
    scenario = {**defaults, **_typed(study.get("scenario", {}), dict, "scenario")}
    scenario |= _typed(table.get("scenario", {}), dict, f"{where}: scenario")
    if scenario.get("method") == "data-parallel":
        own = table.get("scenario", {})
        scenario = {k: v for k, v in scenario.items() if k in own or k in ("peers", "rate", "data_seed", "budget")}
    try:
        manifest = changed(base, _typed(table.get("manifest", {}), dict, f"{where}: manifest"))
    except ConfigError as error:
        raise type(error)(f"{where}: {error}") from None
    sweep = {}
    for key, values in _typed(table.get("sweep", {}), dict, f"{where}: sweep").items():
        good = isinstance(values, list) and values and all(isinstance(v, int | float) for v in values)
        if not good or key.count(".") != 1:
            raise ConfigError(f'{where}: sweep: expected "table.key" = [numbers], found {key} = {values!r}')
        sweep[key] = tuple(values)
    row = Row(
        name,
        manifest,
        Scenario.of(scenario, where),
        against or None,
        margin,
        _whole(table.get("seeds"), f"{where}: seeds"),
        _whole(table.get("tokens"), f"{where}: tokens"),
        sweep,
    )
    row.variants()  # a wrong key is refused now, not after hours
    return row


def check_rows(rows: Iterable[Row]) -> None:
    """Raises :class:`ConfigError` for names that are there twice or missing, and for what no model or swarm can do."""
    names: set[str] = set()
    for row in rows:
        if row.name in names:
            raise ConfigError(f"there are two rows {row.name!r}; give each a name of its own")
        names.add(row.name)
    for row in rows:
        if row.against is not None and row.against not in names:
            raise ConfigError(f"row {row.name!r}: there is no row {row.against!r} to compare with")
        if row.scenario.peers < row.manifest.round.quorum:
            raise ConfigError(
                f"row {row.name!r}: quorum = {row.manifest.round.quorum} exceeds peers = {row.scenario.peers}; set "
                f"manifest.round.quorum to at most {row.scenario.peers}"
            )
        rules = row.manifest.round
        if row.scenario.real:
            continue  # nodes run whatever a manifest may say
        if rules.by == "time" and row.scenario.method != "data-parallel":
            if row.scenario.step_time is None:
                raise ConfigError(
                    f'row {row.name!r}: manifest.round.by = "time" needs to know how long an inner step takes, for '
                    "time goes by in steps here; say it with --step-time SECONDS, or as scenario.step_time"
                )
            if row.scenario.fragments > 1:
                raise ConfigError(
                    f'row {row.name!r}: manifest.round.by = "time" does not go with scenario.fragments, whose rounds '
                    "overlap; set manifest.round.fragments instead"
                )
        if rules.by != "steps" and row.scenario.idle:
            raise ConfigError(
                f"row {row.name!r}: idle peers stand still after their inner steps, and manifest.round.by = "
                f'"{rules.by}" waits for no steps; leave one of them out'
            )
        chunks = -(-row.manifest.state.parameters // row.manifest.state.chunk)
        if row.scenario.fragments > chunks:
            raise ConfigError(
                f"row {row.name!r}: fragments = {row.scenario.fragments} exceeds the model's {chunks} chunks; set it "
                f"to at most {chunks}, or manifest.state.chunk lower"
            )
        if row.manifest.codec.window:
            raise ConfigError(
                f"row {row.name!r}: manifest.codec.window: simulated peers keep one rank; leave it out, or compare "
                "rows of several ranks"
            )
        if row.scenario.rank and row.manifest.codec.name == "lowrank":
            raise ConfigError(
                f'row {row.name!r}: manifest.codec.name = "lowrank" sends factors by itself; leave scenario.rank out'
            )
        experiment = {"fragments": row.scenario.fragments > 1, "rank": row.scenario.rank > 0}
        whole = {"fragments": rules.fragments > 1, "average": rules.average == "radial"}
        if any(whole.values()) and any(experiment.values()):
            ours = " and ".join(f"manifest.round.{key}" for key, said in whole.items() if said)
            others = " and ".join(f"scenario.{key}" for key, tried in experiment.items() if tried)
            raise ConfigError(f"row {row.name!r}: {ours} does not go with {others}; leave one of them out")
        if row.scenario.rank:
            from atoll.node.config import ModelConfig
            from atoll.node.specs import tensor_specs

            most = largest_rank(tensor_specs(ModelConfig.from_table(row.manifest.model)))
            if row.scenario.rank > most:
                raise ConfigError(
                    f"row {row.name!r}: rank = {row.scenario.rank} makes no matrix of the model half as large; set it "
                    f"to at most {most}"
                )


def _known(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    import difflib

    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(keys)}"
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")


def _typed(value: Any, kind: type[Any], where: str) -> Any:
    if not isinstance(value, kind):
        words = {"dict": "a table", "list": "an array", "str": "a string"}[kind.__name__]
        raise ConfigError(f"{where}: expected {words}, found {value!r}")
    return value


def _whole(value: Any, where: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{where}: expected a whole number of at least 1, found {value!r}")
    return value


# ---------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Job:
    """One run: a row at a seed."""

    row: Row
    seed: int
    manifest: Manifest
    """With this seed's initial parameters, and as many rounds as the budget allows."""

    @property
    def ticks(self) -> int:
        """How long it takes."""
        from .simulate import run_ticks

        rules = self.manifest.round
        return run_ticks(self.row.scenario, self.manifest.budget.rounds, rules, _step_tokens(self.manifest))

    @property
    def tokens(self) -> int:
        """About how many tokens it trains on: what its work is measured by."""
        scenario = self.row.scenario
        return round(self.ticks * scenario.peers * _mean_speed(scenario) * _step_tokens(self.manifest))

    def describe(self) -> dict[str, Any]:
        """All that is to be told to whoever runs it."""
        dump = self.manifest.model_dump(exclude={"name", "owner", "signature", "access"})
        return {"manifest": dump, "scenario": self.row.scenario.model_dump(), "seed": self.seed}

    def key(self, code: str) -> str:
        """The name of its result: equal keys, equal results. Only what the result depends on is part of it."""
        described = self.describe()
        manifest = {section: dict(v) if isinstance(v, dict) else v for section, v in described["manifest"].items()}
        real = self.row.scenario.real
        for section, names in WITHOUT_EFFECT.items():
            for name in names:
                if not real or section != "round":
                    manifest[section].pop(name, None)
        if not manifest["round"]["overlap"]:
            for name in ("overlap", "merge", "mix"):
                del manifest["round"][name]
        if manifest["round"]["max_group"] >= self.row.scenario.peers:
            del manifest["round"]["max_group"]
        if manifest["round"]["fragments"] == 1:
            for section, name in LATER:
                del manifest[section][name]
        del manifest["state"]["embeddings"]  # those of the model
        del manifest["state"]["columns"]  # those of the model
        for section, name in (("codec", "rank"), ("codec", "window"), ("codec", "kept"), ("round", "least_steps")):
            if not manifest[section][name]:
                del manifest[section][name]
        if manifest["codec"]["version"] == 1:
            del manifest["codec"]["version"]
        if manifest["outer"]["period"] == 1:
            del manifest["outer"]["period"]
        if manifest["round"]["stale"] == "keep":
            for name in ("stale", "max_age"):
                del manifest["round"][name]
        if manifest["round"]["by"] == "steps":
            for name in ("by", "every"):
                del manifest["round"][name]
        # Once a circumstance, and results of then are to be found.
        once = {name: manifest["round"].pop(name) for name in ("weights", "average")}
        scenario = {**described["scenario"], **once}
        if not real:
            del scenario["real"], scenario["again"]
        if real or self.manifest.round.by != "time":
            del scenario["step_time"]
        text = json.dumps([{**described, "manifest": manifest, "scenario": scenario}, code], sort_keys=True)
        return blake3(text.encode()).hexdigest()[:32]


def job(row: Row, seed: int, tokens: int | None, peers: int) -> Job:
    """The run of ``row`` at ``seed``.

    tokens: of a run of ``peers`` peers of speed 1; rows with ``budget = "time"`` get as many ticks as that takes, the
    others as many as give their own peers that many tokens. None: the manifest's rounds.
    Raises :class:`UsageError` when not even one round fits.
    """
    from .simulate import groups, round_ticks

    scenario, manifest = row.scenario, row.manifest
    tokens = row.tokens or tokens
    if tokens is not None:
        if scenario.budget == "time":
            ticks = tokens / (peers * _step_tokens(manifest))
        else:
            ticks = tokens / (scenario.peers * _mean_speed(scenario) * _step_tokens(manifest))
        each = round_ticks(scenario, manifest.round, _step_tokens(manifest))
        rounds = round(ticks / each) * groups(scenario, manifest.round)
        if rounds < 1:
            raise UsageError(f"row {row.name!r}: {tokens} tokens are less than one round; give more --tokens")
        manifest = manifest.replace(budget={"rounds": rounds})
    return Job(row, seed, _seeded(manifest, seed))


@lru_cache(maxsize=4096)
def _seeded(manifest: Manifest, seed: int) -> Manifest:
    """With other initial parameters and another order of the text."""
    return changed(manifest, {"model": {"seed": int(manifest.model.get("seed", 0)) + seed}})


def aa_row(reference: Row) -> Row:
    """The reference on other text, or with real nodes once more: what no setting has caused."""
    was = reference.scenario
    other = {"again": was.again + 1} if was.real else {"data_seed": was.data_seed + AA_SEED}
    scenario = was.model_copy(update=other)
    return replace(
        reference, name=f"{reference.name} (A/A)", scenario=scenario, against=reference.name, margin=None, sweep={}
    )


def baseline_row(reference: Row, rates: tuple[float, ...], tokens: int | None, peers: int) -> Row:
    """Synchronous data-parallel training at equal tokens and steps, with its own sweep of the learning rate.

    tokens, peers: as of :func:`job`. Raises :class:`UsageError` where nobody can know the reference's tokens.
    """
    was = reference.scenario
    if was.real and reference.manifest.round.by == "time":
        raise UsageError(
            f'--baseline: row {reference.name!r} is run by real nodes with manifest.round.by = "time", so how many '
            "tokens it takes is known when it is over, and the baseline is to have as many; leave --baseline out, or "
            "let the first row be a simulated one"
        )
    scenario = Scenario(method="data-parallel", peers=was.peers, budget=was.budget)
    row = replace(
        reference, name="data-parallel", scenario=scenario, against=None, margin=None, chosen={},
        sweep={"scenario.rate": rates} if len(rates) > 1 else {},
    )  # fmt: skip
    theirs = job(reference, 0, tokens, peers)
    steps = theirs.ticks if was.budget == "time" else round(theirs.ticks * _mean_speed(was))
    with contextlib.suppress(UsageError):  # H steps may be more than all of theirs
        if job(row, 0, tokens, peers).ticks == steps:
            return row
    # Rounds are nothing but a measure here, so they may be shorter.
    most = reference.manifest.round.inner_steps
    rules = {
        "by": "steps", "every": 0, "overlap": 0, "merge": "carry", "fragments": 1, "least_steps": 0,
        "weights": "tokens", "inner_steps": next(each for each in range(most, 0, -1) if steps % each == 0),
    }  # fmt: skip
    return replace(
        row, manifest=changed(row.manifest, {"round": rules}), tokens=steps * was.peers * _step_tokens(row.manifest),
        scenario=scenario.model_copy(update={"budget": "tokens"}),
    )  # fmt: skip


def _mean_speed(scenario: Scenario) -> float:
    return sum(scenario.speeds) / len(scenario.speeds) if scenario.speeds and not scenario.idle else 1.0


def _step_tokens(manifest: Manifest) -> int:
    return int(manifest.inner["batch"]) * int(manifest.model["context"])
