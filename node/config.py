"""The node's own tables of a manifest, typed: ``[model]``, ``[data]`` and ``[inner]``.

The protocol treats these tables as opaque scalars; here they get their meaning. Nothing here imports torch, so the
command line can validate a manifest at once. A manifest may name a preset and override single fields of it
(:mod:`atoll.node.presets`); :meth:`ModelConfig.to_table` writes every field out, so that a signed manifest does not
depend on what a preset means in a later version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from atoll.protocol.errors import ManifestError
from atoll.protocol.manifest import Manifest, explain

from .presets import DEFAULT_PRESET, INNER, PRESETS


class _Table(BaseModel):
    """A table of a manifest: scalars only, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def to_table(self) -> dict[str, str | int | float | bool]:
        """Every field that is set, as scalars; ``from_table`` reads it back."""
        return self.model_dump(exclude_none=True)


class ModelConfig(_Table):
    """The decoder-only transformer of :mod:`atoll.node.model`."""

    preset: str = DEFAULT_PRESET
    """The preset whose values fill what a manifest leaves out."""
    vocab: int = Field(ge=256, le=1 << 20)
    """Tokens; 256 for bytes, which is what the data sources of this version give."""
    width: int = Field(ge=8, le=1 << 15)
    """Elements of a token's vector."""
    layers: int = Field(ge=1, le=256)
    """Blocks of attention and feed-forward network."""
    heads: int = Field(ge=1, le=256)
    """Attention heads."""
    kv_heads: int = Field(ge=1, le=256)
    """Key/value heads; fewer than ``heads`` is grouped-query attention (arXiv:2305.13245)."""
    ffn: int = Field(ge=8, le=1 << 17)
    """Inner width of SwiGLU (arXiv:2002.05202)."""
    context: int = Field(ge=8, le=1 << 17)
    """Tokens in one training sequence."""
    rope_theta: float = Field(default=10000.0, gt=1)
    """Base of the rotary positions' wavelengths (arXiv:2104.09864)."""
    tied: bool = False
    """Whether the output head is the embedding matrix."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of θ₀."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} must be a multiple of heads = {self.heads}")
        if (self.width // self.heads) % 2:
            raise ValueError(
                f"width / heads = {self.width // self.heads} must be even, for rotary positions turn pairs"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        return self

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> ModelConfig:
        """The preset that ``table`` names, overridden by its other keys. Raises :class:`ManifestError`."""
        name = table.get("preset", DEFAULT_PRESET)
        if name not in PRESETS:
            raise ManifestError(f"[model] preset: there is no {name!r}; known are {', '.join(PRESETS)}")
        return _validated(cls, {**PRESETS[name], **table}, "model")


class DataConfig(_Table):
    """Where the training bytes come from, and the hash that pins them."""

    source: Literal["stdlib", "text"] = "stdlib"
    """``stdlib``: the sources of Python's standard library, there on every machine; ``text``: a folder or file."""
    path: str | None = None
    """Folder or file of text, with ``source = "text"``. A node may have it elsewhere than the organiser."""
    files: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """BLAKE3 of the sorted list of files and their hashes; missing until pinned."""
    python: str | None = None
    """Version of Python whose standard library was pinned; only used to explain a mismatch."""
    count: int | None = Field(default=None, ge=0)
    """Number of files pinned; only used to explain a mismatch."""
    unit: Literal["sequence"] = "sequence"
    """What one sample unit of a lease is."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.source == "stdlib" and self.path is not None:
            raise ValueError('path is only for source = "text"; remove it, or write source = "text"')
        return self

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> DataConfig:
        """Raises :class:`ManifestError`."""
        return _validated(cls, table, "data")


class InnerConfig(_Table):
    """The inner optimizer. Rates are peaks; :func:`atoll.node.optim.rate` gives the factor at a moment of the run."""

    optimizer: Literal["muon", "adamw", "adamw8bit"] = INNER["optimizer"]
    """``muon``: Muon for the matrices inside the layers, AdamW for embedding, norms and head."""
    lr: float = Field(default=INNER["lr"], gt=0, le=10)
    """Rate of Muon (of the matrices); with ``adamw`` unused."""
    adamw_lr: float = Field(default=INNER["adamw_lr"], gt=0, le=1)
    """Rate of AdamW."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's average of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's average of squared gradients."""
    weight_decay: float = Field(default=INNER["weight_decay"], ge=0, le=10)
    """Decoupled, on matrices only."""
    batch: int = Field(default=INNER["batch"], ge=1, le=1 << 16)
    """Sequences (sample units) in one inner step of one peer."""
    warmup: float = Field(default=INNER["warmup"], ge=0, le=0.5)
    """Share of the run over which the rate rises to its peak."""
    decay: Literal["cosine", "linear"] = INNER["decay"]
    """How the rate falls from its peak to ``final_lr``."""
    final_lr: float = Field(default=INNER["final_lr"], ge=0, le=1)
    """Rate at the end of the run, as a share of the peak."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest norm of the whole gradient; 0: no clipping."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> InnerConfig:
        """Raises :class:`ManifestError`."""
        return _validated(cls, table, "inner")


def to_toml(manifest: Manifest) -> str:
    """The manifest as TOML with a comment to every field, those of the node's tables included."""
    tables: dict[str, type[_Table]] = {"model": ModelConfig, "data": DataConfig, "inner": InnerConfig}
    comments = {
        name: {key: (field.description or "").replace("``", "`") for key, field in table.model_fields.items()}
        for name, table in tables.items()
    }
    return manifest.to_toml(comments)


def _validated(kind: type[Any], table: Mapping[str, Any], where: str) -> Any:
    try:
        return kind.model_validate(dict(table))
    except ValidationError as error:
        raise ManifestError(explain(error, kind, where)) from None
