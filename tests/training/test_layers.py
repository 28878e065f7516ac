"""Attention and norm of the local layers against their definitions, and the CPU view of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.training.attention import SDPAttention, causal_mask
from megatron.training.flops import flops_per_step
from megatron.training.norm import Norm
from tests.training.runs import settings

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")


def config(**options):
    """Return settings of a layer with 4 heads in 2 groups of width 8."""
    base = dict(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0)
    return TransformerConfig(**{**base, **options})


def attend(query, key, value, visible):
    """Attention by its definition, in double precision: [seq, batch, heads, width] to [seq, batch, heads x width]."""
    key, value = (t.repeat_interleave(query.size(2) // t.size(2), dim=2).double() for t in (key, value))
    scores = torch.einsum("ibhd,jbhd->bhij", query.double(), key) / query.size(3) ** 0.5
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), value).flatten(2)


@pytest.fixture
def inputs():
    """Query, key and value of 12 tokens, 3 samples."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(12, 3, heads, 8, generator=generator) for heads in (4, 2, 2)]


def build(**options):
    """Return the attention module of layer 1."""
    return SDPAttention(config(**options), 1, AttnMaskType.causal, "self")


def test_attention_is_causal_and_grouped(inputs):
    """Grouped causal attention follows its definition."""
    expected = attend(*inputs, ~causal_mask(12, inputs[0].device))
    torch.testing.assert_close(build()(*inputs, None), expected.float(), rtol=1e-5, atol=1e-6)


def test_attention_window(inputs):
    """A window of 3 lets each token see itself and three tokens before it."""
    rows, columns = torch.arange(12)[:, None], torch.arange(12)[None, :]
    expected = attend(*inputs, (columns <= rows) & (columns >= rows - 3))
    torch.testing.assert_close(build(window_size=(3, 0))(*inputs, None), expected.float(), rtol=1e-5, atol=1e-6)


def test_attention_mask_hides(inputs):
    """A mask that is True hides a position, in each sample its own ones."""
    mask = causal_mask(12, inputs[0].device).repeat(3, 1, 1, 1)
    mask[1, 0, 6:, :6] = True
    torch.testing.assert_close(build()(*inputs, mask), attend(*inputs, ~mask).float(), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(build()(*inputs, mask)[:, 1], build()(*inputs, None)[:, 1])


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm(kind, zero_centered):
    """Both norms follow their formulas, with weights around 1 or around 0."""
    norm = Norm(config(normalization=kind, layernorm_zero_centered_gamma=zero_centered), 32, eps=1e-3)
    x = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(1)) + 2
    centered = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    expected = centered / (centered.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), expected)
    with torch.no_grad():
        norm.weight.add_(1)
    torch.testing.assert_close(norm(x), expected * 2)


def test_norm_is_marked_for_sequence_parallelism():
    """Its parameters carry the mark by which gradients are summed over tensor-parallel ranks."""
    norm = Norm(config(sequence_parallel=True, tensor_model_parallel_size=2), 32)
    assert all(parameter.sequence_parallel for parameter in norm.parameters())
    assert not any(parameter.sequence_parallel for parameter in Norm(config(), 32).parameters())


def test_torch_itself_is_untouched():
    """Teaching megatron-core to live on the CPU changes nothing that other code sees in torch."""
    code = (
        "import torch, warnings; warnings.simplefilter('ignore')\n"
        "names = ['zeros', 'empty', 'tensor', 'get_rng_state', 'set_rng_state', 'Tensor']\n"
        "cuda = ['current_device', 'synchronize', 'get_rng_state', 'manual_seed']\n"
        "before = [getattr(torch, n) for n in names] + [getattr(torch.cuda, n) for n in cuda] + [torch.Tensor.cuda]\n"
        "from megatron.training import cpu\n"
        "cpu.enable()\n"
        "after = [getattr(torch, n) for n in names] + [getattr(torch.cuda, n) for n in cuda] + [torch.Tensor.cuda]\n"
        "assert before == after\n"
        "import megatron.core.pipeline_parallel.schedules as schedules\n"
        "assert schedules.torch.zeros(1, device='cuda').device.type == 'cpu'\n"
        "assert schedules.torch is not torch and schedules.torch.Tensor is torch.Tensor\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_flops_of_a_known_model():
    """The operations of a step are 6 per weight and token, plus the unmasked half of the attention."""
    model = settings("--num-layers 3 --swiglu --train-iters 1").model
    weights = 3 * (4 * 32 * 32 + 3 * 32 * model.ffn_hidden_size) + 32 * 128
    attention = 3 * 2 * 32 * 32 / 2
    assert flops_per_step(model, 128, 5) == 6 * (weights + attention) * 32 * 5
