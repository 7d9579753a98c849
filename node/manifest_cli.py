"""``atoll manifest``: write, show, sign and check the constitution of a run."""

from __future__ import annotations

import os
import secrets
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from atoll.protocol.errors import AtollError
    from atoll.protocol.manifest import Manifest

manifest_app = typer.Typer(
    help="Write, show, sign and check a run's manifest: `new` writes one, edit it, `sign` completes it, and "
    "`atoll bootstrap` starts the run.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The manifest, a TOML file.", show_default=False)]


class Optimizer(StrEnum):
    muon = "muon"
    adamw = "adamw"
    adamw8bit = "adamw8bit"


class By(StrEnum):
    steps = "steps"
    tokens = "tokens"
    time = "time"


class Average(StrEnum):
    mean = "mean"
    radial = "radial"


class Weights(StrEnum):
    tokens = "tokens"
    tokens2_steps = "tokens2/steps"
    equal = "equal"


class Codec(StrEnum):
    float32 = "float32"
    float16 = "float16"
    int8 = "int8"
    int4 = "int4"
    sparse = "sparse"
    lowrank = "lowrank"


@manifest_app.command()
def new(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write it.")] = Path(
        "run.toml"
    ),
    name: Annotated[
        str | None, typer.Option(help="Name of the run. \\[default: the file's]", show_default=False)
    ] = None,
    preset: Annotated[str, typer.Option(help="Size of the model: demo, tiny, 10m, 60m, 150m, 400m, 1b.")] = "demo",
    data: Annotated[
        str, typer.Option(metavar="stdlib|PATH", help="Python's own sources, or a folder or file of text.")
    ] = "stdlib",
    optimizer: Annotated[Optimizer, typer.Option(help="Inner optimizer.")] = Optimizer.muon,
    lr: Annotated[
        float | None,
        typer.Option(help="Peak inner rate. \\[default: 0.02 for Muon, 0.003 for AdamW]", show_default=False),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences in a step of one peer.", show_default="4")] = None,
    inner_steps: Annotated[
        int | None, typer.Option("--inner-steps", "-H", help="Inner steps in a round.", show_default="50")
    ] = None,
    fragments: Annotated[
        int | None,
        typer.Option(metavar="P", help="Parts of the model that are averaged in turn.", show_default="1"),
    ] = None,
    overlap: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            help="Inner steps made while a round is in flight; above H/P: several at once.",
            show_default="0",
        ),
    ] = None,
    by: Annotated[
        By | None, typer.Option(help="What makes a round due; with tokens or time give --every.", show_default="steps")
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(metavar="N", help="Tokens of all peers together, or seconds, from round to round.", min=0),
    ] = None,
    quorum: Annotated[int | None, typer.Option(help="Peers that make a round.", show_default="2")] = None,
    average: Annotated[Average | None, typer.Option(help="How contributions become one.", show_default="mean")] = None,
    weights: Annotated[
        Weights | None, typer.Option(help="What a contribution weighs in the average.", show_default="tokens")
    ] = None,
    codec: Annotated[
        Codec,
        typer.Option(
            help="How pseudo-gradients are packed. A round of 4 moves 3.9 (int8), 7.5 (int4), 57 (sparse) times less."
        ),
    ] = Codec.int8,
    rank: Annotated[int | None, typer.Option(help="Rank of the factors of --codec lowrank.", show_default="8")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", "-r", help="Rounds of the run.", show_default="60")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the initial parameters.", show_default="0")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> int:
    """Write a new manifest, complete, with comments.

    Edit it to taste, then sign it. After changing the model, delete parameters, chunk, layers, embeddings, columns and
    theta0 in the state table; after changing fragments, packing, codec or rank, layers, columns and theta0; after
    changing average, layers and embeddings; after changing batch or inner_steps, weight_cap, first_lease and max_lease
    in the round table: signing computes them again.

    Examples:

      atoll manifest new -o reef.toml --preset 10m --rounds 2000 --inner-steps 200

      atoll manifest new --data ~/texts --optimizer adamw
    """
    from atoll.protocol.errors import UsageError

    from .config import to_toml
    from .run_defaults import new_manifest

    if os.path.lexists(output) and not force:
        raise UsageError(f"{output} exists; name another file with -o, or overwrite it with --force")
    manifest = new_manifest(
        name if name is not None else output.stem or "run",
        preset=preset,
        data=data if data == "stdlib" else Path(data).expanduser().resolve(),
        optimizer=optimizer.value,
        lr=lr,
        batch=batch,
        seed=seed,
        inner_steps=inner_steps,
        overlap=overlap,
        fragments=fragments,
        by=by.value if by is not None else None,
        every=every,
        quorum=quorum,
        average=average.value if average is not None else None,
        weights=weights.value if weights is not None else None,
        codec=codec.value,
        rank=rank,
        rounds=rounds,
    )
    _write(output, to_toml(manifest))
    typer.echo(f"wrote {output}: {manifest.state.parameters:,} parameters, {manifest.budget.rounds} rounds")
    typer.echo(f"next: atoll manifest sign {_word(output)} --key owner.key")
    return 0


@manifest_app.command()
def show(
    file: FileArgument,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Show what a manifest says, its run id, and whether its signature is good."""
    manifest = _load(file)
    if json:
        import json as json_module

        whole = {"run_id": manifest.run_id.hex(), "signed": _signature(manifest) == "good"} | manifest.model_dump()
        typer.echo(json_module.dumps(whole, indent=2, ensure_ascii=False))
        return 0
    typer.echo(f"{manifest.name}: protocol {manifest.protocol}, run id {manifest.run_id.hex()}")
    typer.echo(f"owner {manifest.owner or '-'}, signature {_signature(manifest)}")
    for key, value in manifest.model_dump().items():
        if isinstance(value, dict):
            fields = ", ".join(f"{name} {_brief(item)}" for name, item in value.items())
            typer.echo(f"  {key:<8}{fields or '-'}")
    return 0


@manifest_app.command()
def sign(
    file: FileArgument,
    key: Annotated[
        Path, typer.Option("--key", "-k", metavar="KEYFILE", help="The owner's key; made when there is none.")
    ],
) -> int:
    """Fill in what is missing and sign. Comments and the order of FILE stay; KEYFILE makes you the owner.

    Keep KEYFILE: whoever has it can sign as you, and nobody else ever can.

    Example:

      atoll manifest sign reef.toml --key ~/.config/atoll/owner.key
    """
    from atoll.protocol.errors import UsageError
    from atoll.protocol.identity import load_or_create_identity
    from atoll.protocol.manifest import Manifest, read_manifest_file, read_toml

    from .run_defaults import complete, verify

    with _naming(file):
        text = read_manifest_file(file)
        raw = read_toml(text)
        full = complete(raw)
        verify(Manifest.from_dict(full | {"owner": "", "signature": ""}))
    fresh = not os.path.lexists(key)
    if fresh and raw.get("owner") not in (None, ""):
        raise UsageError(
            f"{file} belongs to {raw['owner']}, and there is no key in {key}; use the owner's key, or set "
            'owner = "" to make another run of it'
        )
    owner = load_or_create_identity(key)
    if raw.get("owner") not in (None, "", owner.peer_id):
        raise UsageError(
            f"{file} belongs to {raw['owner']}, and {key} is the key of {owner.peer_id}; use the owner's key, or set "
            'owner = "" to make another run of it'
        )
    signed = Manifest.from_dict(full | {"owner": "", "signature": ""}).sign(owner)
    _write(file, _edited(text.decode(), signed))
    if fresh:
        typer.echo(f"made a new key in {key}: keep it, only with it can you sign as {owner.peer_id}")
    filled = _filled(raw, signed)
    if filled:
        typer.echo(f"filled in {', '.join(filled)}")
    typer.echo(f"signed {file}: run id {signed.run_id.hex()}")
    typer.echo(f"next: atoll bootstrap --manifest {_word(file)}")
    return 0


@manifest_app.command()
def check(file: FileArgument) -> int:
    """Say what is wrong with a manifest (exit code 3), or that it is ready, and what it resolves to.

    A manifest that is not signed yet is not ready.
    """
    from atoll.protocol.errors import ManifestError

    from .run_defaults import Tables, data_here, verify

    manifest = _load(file)
    problems = []
    tables: Tables | None = None
    try:
        tables = verify(manifest)
    except ManifestError as error:
        problems.append(str(error))
    try:
        manifest.check_signature(file)
    except ManifestError as error:
        if not problems and not manifest.signature:
            # Nothing is wrong with it; it is where it should be between `new` and `sign`.
            raise type(error)(f"{file} is complete, but {str(error).removeprefix('the manifest is ')}") from None
        problems.append(str(error))
    if problems or tables is None:
        raise ManifestError(f"{file}: {'; '.join(problems)}")
    model, data = tables.model, tables.data
    missing = data_here(data, model.context)
    typer.echo(f"ok: run id {manifest.run_id.hex()}, signed by {manifest.owner}")
    typer.echo(
        f"model: {manifest.state.parameters:,} parameters, {model.layers} layers of width {model.width}, "
        f"{model.heads} heads, context {model.context}"
    )
    typer.echo(f"data: {data.source}, {data.count or '?'} files, hash {(data.files or '')[:16]}…")
    typer.echo(f"data here: {'the same' if missing is None else missing}")
    return 0


# ---------------------------------------------------------------------------------------- helpers


class _naming:
    """Puts the file's name in front of what is wrong in it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from atoll.protocol.errors import ManifestError, VersionError

        if isinstance(error, ManifestError | VersionError) and str(self.file) not in str(error):
            raise type(error)(f"{self.file}: {error}") from None


def _load(file: Path) -> Manifest:
    from atoll.protocol.errors import ManifestError
    from atoll.protocol.manifest import Manifest

    try:
        return Manifest.load(file)
    except ManifestError as error:
        hint = (
            f"; fill in what follows from the rest with: atoll manifest sign {_word(file)} --key owner.key"
            if ": missing; expected" in str(error)
            else ""
        )
        raise type(error)(f"{error}{hint}") from None


def _word(path: Path) -> str:
    """A path as a shell takes it for one word."""
    return shlex.quote(str(path))


def _signature(manifest: Manifest) -> str:
    from atoll.protocol.errors import SignatureError

    if not manifest.signature:
        return "missing"
    try:
        manifest.check_signature()
    except SignatureError:
        return "BAD: the manifest was changed after signing"
    return "good"


def _brief(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{len(value)}]" if value else "none"
    text = str(value)
    return text if len(text) <= 40 else text[:16] + "…"


def _filled(raw: dict[str, Any], signed: Manifest) -> list[str]:
    """The fields that did not stand in the file."""
    found = []
    for key, value in signed.written().items():
        if isinstance(value, dict):
            had = raw.get(key, {})
            found += [f"{key}.{name}" for name in value if name not in had]
        elif key not in raw and key not in ("owner", "signature"):
            found.append(key)
    return found


def _edited(text: str, manifest: Manifest) -> str:
    """``text`` with the values of ``manifest``, its comments and order kept."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    from atoll.protocol.errors import ManifestError, VersionError
    from atoll.protocol.manifest import Manifest as Kind

    from .config import to_toml

    try:
        if text == to_toml(Kind.from_toml(text)):
            return to_toml(manifest)  # as `new` wrote it: keep its layout
    except (ManifestError, VersionError):
        pass
    try:
        document: Any = tomlkit.parse(text)
        for key, value in manifest.written().items():
            if not isinstance(value, dict):
                if document.get(key) != value:
                    document[key] = value
                continue
            if key not in document:
                document[key] = tomlkit.table()
            for name, item in value.items():
                if name not in document[key]:
                    document[key][name] = list(item) if isinstance(item, tuple) else item
        edited = tomlkit.dumps(document)
        if Kind.from_toml(edited) == manifest:
            return edited
    except (TOMLKitError, ManifestError):
        pass  # an unusual layout, such as dotted keys: written anew, the values are what matters
    return to_toml(manifest)


def _write(path: Path, text: str) -> None:
    """Write or replace a file whole or not at all. A symbolic link stays, its target is replaced."""
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        os.replace(temporary, target)
    except OSError as error:
        raise _cannot_write(path, error) from None
    finally:
        try:
            temporary.unlink()
        except OSError:
            pass


def _cannot_write(path: Path, error: OSError) -> AtollError:
    import errno

    from atoll.protocol.errors import ResourceError, StateError

    what = f"cannot write {path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return ResourceError(f"{what}; free some space or name another file")
    return StateError(f"{what}; name a file in a folder that exists and is writable")
