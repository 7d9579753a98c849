"""Learning rates along the run, and Muon."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from atoll.node.config import InnerConfig, ModelConfig
from atoll.node.model import Transformer
from atoll.node.optim import AdamW, InnerOptimizer, Muon, _kind, orthogonalise, progress_of_run, rate
from atoll.node.optim8bit import AdamW8bit
from atoll.node.specs import count_parameters
from atoll.protocol.errors import ResourceError


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_rate_rises_then_falls_to_its_end(decay: str) -> None:
    config = InnerConfig.from_table({"warmup": 0.1, "decay": decay, "final_lr": 0.2})
    values = [rate(config, p) for p in np.linspace(0, 1, 101)]
    assert 0 < values[0] < 0.1
    assert values[10] == pytest.approx(1)
    assert values[100] == rate(config, 7.0) == pytest.approx(0.2)
    assert values[:11] == sorted(values[:11])
    assert values[10:] == sorted(values[10:], reverse=True)


def test_rate_without_warmup_starts_at_its_peak() -> None:
    assert rate(InnerConfig(warmup=0.0), 0.0) == 1.0


def test_progress_follows_the_run_and_waits_at_the_end_of_a_round() -> None:
    assert progress_of_run(0, 0, 50, 10) == 0
    assert progress_of_run(3, 25, 50, 10) == pytest.approx(0.35)
    assert progress_of_run(3, 500, 50, 10) == pytest.approx(0.4)
    assert progress_of_run(12, 0, 50, 10) == 1


def test_progress_of_a_run_in_fragments_goes_as_far_with_as_many_steps() -> None:
    """Three rounds of 18 steps in three fragments: an outer step every 6, and the same schedule as with one."""
    for step in range(3 * 18):
        whole = progress_of_run(step // 18, step % 18, 18, 3)
        assert progress_of_run(step // 6, step % 6, 18, 3, 3) == pytest.approx(whole)
    assert progress_of_run(4, 100, 18, 3, 3) == pytest.approx(5 / 9)
    assert progress_of_run(10, 0, 18, 3, 3) == 1, "while it winds up"


@pytest.mark.parametrize(("small", "large"), [(16, 16), (16, 40), (1, 8)])
def test_orthogonalise_levels_the_singular_values(small: int, large: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, small, large)
    y = orthogonalise(x)
    values = torch.linalg.svdvals(y)
    assert values.min() > 0.3
    assert values.max() < 1.3
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(y.flatten(1), (u @ vh).flatten(1)).min() > 0.9


def test_a_zero_gradient_stays_zero() -> None:
    assert torch.equal(orthogonalise(torch.zeros(1, 4, 6)), torch.zeros(1, 4, 6))


def test_muon_handles_stacked_matrices_like_separate_ones() -> None:
    torch.manual_seed(1)
    config = InnerConfig()
    first, second = torch.randn(8, 12), torch.randn(20, 12)
    joined = nn.Parameter(torch.cat([first, second]))
    apart = [nn.Parameter(first.clone()), nn.Parameter(second.clone())]
    together, separate = Muon([(joined, (8, 20))], config), Muon([(p, (len(p),)) for p in apart], config)
    for _ in range(3):
        gradient = torch.randn(28, 12)
        joined.grad = gradient.clone()
        apart[0].grad, apart[1].grad = gradient[:8].clone(), gradient[8:].clone()
        together.step(0.05)
        separate.step(0.05)
    torch.testing.assert_close(joined.detach(), torch.cat([p.detach() for p in apart]))
    assert not torch.equal(joined.detach()[:8], first)


def test_muon_moves_against_the_gradient_at_its_rate() -> None:
    parameter = nn.Parameter(torch.zeros(16, 16))
    parameter.grad = torch.randn(16, 16)
    Muon([(parameter, (16,))], InnerConfig()).step(0.1)
    assert float((parameter.detach() * parameter.grad).sum()) < 0
    # an orthogonal matrix of n rows has norm √n
    assert float(parameter.detach().norm()) == pytest.approx(0.1 * 4, rel=0.3)


def test_weight_decay_spares_embedding_norms_and_head() -> None:
    model = ModelConfig.from_table({"width": 16, "heads": 2, "kv_heads": 2, "ffn": 16, "layers": 1, "context": 8})
    for name in ("muon", "adamw"):
        transformer = Transformer(model, torch.ones(count_parameters(model)))
        optimizer = InnerOptimizer(
            transformer, InnerConfig.from_table({"optimizer": name, "weight_decay": 1.0, "warmup": 0.0})
        )
        for parameter in transformer.named.values():
            parameter.grad = torch.zeros_like(parameter)
        assert optimizer.step(0.0)
        for n, parameter in transformer.named.items():
            decayed = parameter.dim() == 2 and n not in ("embedding", "head")
            assert bool((parameter < 1).all()) == decayed, n
            assert parameter.grad is None


def test_adamw_takes_the_steps_of_its_paper() -> None:
    """arXiv:1711.05101, algorithm 2, in float64."""
    torch.manual_seed(2)
    config = InnerConfig.from_table({"beta1": 0.9, "beta2": 0.95})
    parameter = nn.Parameter(torch.randn(6, 5))
    expected, m, v = parameter.detach().double(), torch.zeros(6, 5).double(), torch.zeros(6, 5).double()
    optimizer = AdamW([parameter], config, 0.1)
    for t in range(1, 6):
        lr = 0.01 * t
        gradient = torch.randn(6, 5)
        parameter.grad = gradient.clone()
        optimizer.step(lr)
        m = 0.9 * m + 0.1 * gradient
        v = 0.95 * v + 0.05 * gradient.double() ** 2
        expected = expected - lr * (m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8) + 0.1 * expected)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_eight_bits_of_state_train_about_as_well() -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(3)
    target = torch.randn(64, 128)
    ends = {}
    for name in ("adamw", "adamw8bit"):
        config = InnerConfig.from_table({"optimizer": name})
        parameter = nn.Parameter(torch.zeros(64, 128))
        optimizer = _kind(config)([parameter], config, 0.0)
        for _ in range(60):
            parameter.grad = parameter.detach() - target
            optimizer.step(0.05)
        ends[name] = float((parameter.detach() - target).square().mean())
    assert isinstance(optimizer, AdamW8bit)
    assert optimizer.optimizer.state[parameter]["state1"].dtype is torch.uint8
    assert ends["adamw8bit"] < 0.1
    assert ends["adamw8bit"] == pytest.approx(ends["adamw"], abs=0.05)


def test_a_missing_bitsandbytes_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as where it is not installed
    with pytest.raises(ResourceError, match=r"pip install 'atoll\[bitsandbytes\]'"):
        AdamW8bit([nn.Parameter(torch.zeros(4, 4))], InnerConfig(), 0.0)


def test_training_does_not_import_the_compiler() -> None:
    """It takes seconds, at the start of every trainer."""
    code = """if True:
        import sys
        import numpy as np
        from atoll.node.config import InnerConfig, ModelConfig
        from atoll.node.learner import Learner
        from atoll.node.specs import count_parameters
        model = ModelConfig.from_table({"width": 16, "heads": 2, "kv_heads": 2, "ffn": 16, "layers": 1, "context": 8})
        theta = np.full(count_parameters(model), 0.1, np.float32)
        learner = Learner(model, InnerConfig(), 5, 5, np.arange(999).astype(np.uint8), theta, device="cpu")
        learner.step(np.arange(4), 0, 0)
        assert not any(name.startswith(("torch._dynamo", "torch._inductor", "sympy")) for name in sys.modules)
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
