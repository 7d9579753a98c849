"""The transformer, its layout, and the learner that steps it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from atoll.node.config import DataConfig, InnerConfig, ModelConfig
from atoll.node.learner import Learner, choose_device
from atoll.node.model import Transformer
from atoll.node.presets import PRESETS
from atoll.node.specs import count_parameters, matrices, tensor_specs
from atoll.protocol.errors import ManifestError, ResourceError
from atoll.protocol.theta0 import theta0

TABLE = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48, "context": 16}


def make(**overrides: object) -> tuple[ModelConfig, np.ndarray, Transformer]:
    model = ModelConfig.from_table({**TABLE, **overrides})
    flat = theta0(0, tensor_specs(model))
    return model, flat, Transformer(model, torch.from_numpy(flat))


def learner(text: np.ndarray, micro_batch: int | None = None, **inner: object) -> Learner:
    model, flat, _ = make()
    return Learner(model, InnerConfig.from_table(inner), 10, 10, text, flat, device="cpu", micro_batch=micro_batch)


@pytest.fixture
def text() -> np.ndarray:
    return np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 100, np.uint8)


def test_parameters_are_views_in_flat_order() -> None:
    model, flat, transformer = make()
    with torch.no_grad():
        for number, parameter in enumerate(transformer.named.values()):
            parameter.fill_(number)
    at = 0
    for number, spec in enumerate(tensor_specs(model)):
        assert (flat[at : at + spec.size] == number).all()
        at += spec.size
    assert at == count_parameters(model) == flat.size


def test_a_byte_depends_on_those_before_it_only() -> None:
    _, _, transformer = make()
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] ^= 1
    before, after = transformer(tokens), transformer(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9:], after[0, 9:])


def test_attention_sees_relative_positions() -> None:
    """A repeated pair of bytes at two places gives the same logits when nothing else is in sight."""
    _, _, transformer = make(layers=1)
    one = transformer(torch.tensor([[7]]))[0, 0]
    same = transformer(torch.tensor([[7, 7, 7, 7]]))[0]
    torch.testing.assert_close(same, one.expand_as(same), rtol=1e-4, atol=1e-5)


def test_tied_head_is_the_embedding() -> None:
    _, flat, transformer = make(tied=True)
    assert transformer.head is transformer.embedding
    assert flat.size == count_parameters(ModelConfig.from_table(TABLE)) - 256 * 32
    transformer.loss(torch.randint(0, 256, (2, 17))).backward()
    assert all(p.grad is not None for p in transformer.named.values())


def test_loss_starts_near_uniform() -> None:
    _, _, transformer = make()
    assert transformer.loss(torch.randint(0, 256, (8, 17))).item() == pytest.approx(np.log(256), abs=0.4)


@pytest.mark.parametrize(
    ("preset", "low", "high"),
    [
        ("demo", 0.1e6, 0.5e6),
        ("tiny", 0.5e6, 1.5e6),
        ("10m", 9e6, 12e6),
        ("60m", 55e6, 66e6),
        ("150m", 135e6, 165e6),
        ("400m", 360e6, 440e6),
        ("1b", 0.9e9, 1.1e9),
    ],
)
def test_preset_sizes(preset: str, low: float, high: float) -> None:
    assert low < count_parameters(ModelConfig.from_table({"preset": preset})) < high


def test_a_full_table_reads_back() -> None:
    for preset in PRESETS:
        model = ModelConfig.from_table({"preset": preset, "seed": 5})
        assert ModelConfig.from_table(model.to_table()) == model
    assert InnerConfig.from_table(InnerConfig().to_table()) == InnerConfig()
    assert DataConfig.from_table(DataConfig().to_table()) == DataConfig()


@pytest.mark.parametrize(
    ("kind", "table", "words"),
    [
        (ModelConfig, {"widht": 64}, "width"),
        (ModelConfig, {"preset": "huge"}, "demo"),
        (ModelConfig, {"width": 30, "heads": 4}, "multiple of heads"),
        (ModelConfig, {"heads": 4, "kv_heads": 3}, "multiple of kv_heads"),
        (ModelConfig, {"layers": "two"}, "model.layers"),
        (InnerConfig, {"lr": -1}, "inner.lr"),
        (InnerConfig, {"optimizer": "moun"}, "muon"),
        (DataConfig, {"source": "text", "files": "abc"}, "data.files"),
        (DataConfig, {"path": "x"}, "path is only for"),
    ],
)
def test_a_wrong_table_is_explained(kind: type[ModelConfig], table: dict[str, object], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        kind.from_table(table)


def test_layout_and_config_need_no_torch() -> None:
    code = "import sys, atoll.node.specs, atoll.node.trainer, atoll.node.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_muon_takes_the_matrices_of_the_layers() -> None:
    model, _, transformer = make()
    for name, rows in matrices(model):
        assert sum(rows) == transformer.named[name].shape[0]
    assert {n for n, _ in matrices(model)} == {
        n for n, p in transformer.named.items() if p.dim() == 2 and n not in ("embedding", "head")
    }


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_it_learns_in_place(text: np.ndarray, optimizer: str) -> None:
    one = learner(text, optimizer=optimizer)
    memory = one.host.numpy()
    before = memory.copy()
    losses = [one.step(np.arange(i * 4, i * 4 + 4), 0, 5) for i in range(30)]
    assert np.mean(losses[-5:]) < np.mean(losses[:2]) - 1.5
    assert not np.array_equal(before, memory)


def test_micro_batches_change_nothing_but_memory(text: np.ndarray) -> None:
    whole, parts = learner(text, batch=6), learner(text, micro_batch=4, batch=6)
    for i in range(3):
        units = np.arange(i * 6, i * 6 + 6)
        assert whole.step(units, 0, 5) == pytest.approx(parts.step(units, 0, 5), rel=1e-5)
    np.testing.assert_allclose(whole.host.numpy(), parts.host.numpy(), atol=2e-3)


def test_out_of_memory_halves_the_micro_batch_and_repeats_the_step(
    text: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight, roomy = learner(text, batch=8), learner(text, micro_batch=2, batch=8)
    loss = Transformer.loss

    def scarce(self: Transformer, tokens: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        value = loss(self, tokens, reduction)
        if len(tokens) > 2:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 1 TiB")
        return value

    monkeypatch.setattr(Transformer, "loss", scarce)
    for i in range(2):
        units = np.arange(i * 8, i * 8 + 8)
        assert tight.step(units, 0, 5) == roomy.step(units, 0, 5)
    assert tight.micro_batch == 2
    assert np.array_equal(tight.host.numpy(), roomy.host.numpy())


def test_a_sequence_that_never_fits_is_said_so(text: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Transformer, tokens: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    one = learner(text)
    monkeypatch.setattr(Transformer, "loss", none)
    with pytest.raises(ResourceError, match="does not fit"):
        one.step(np.arange(4), 0, 0)


def test_a_gradient_that_is_not_finite_changes_nothing(text: np.ndarray) -> None:
    one = learner(text)
    one.host[-1] = float("nan")
    before = one.host.numpy().copy()
    one.step(np.arange(4), 0, 5)
    assert one.skipped == 1
    np.testing.assert_array_equal(before, one.host.numpy())


@pytest.mark.parametrize("name", ["cuda:63", "gpu", "meta"])
def test_an_absent_device_is_refused(name: str) -> None:
    with pytest.raises(ResourceError, match="device"):
        choose_device(name)
