"""Windows and documents through flex_attention on a GPU: the masked definition's outputs and gradients, less memory."""

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.training import attention, flex
from megatron.training.batch import BatchShape, next_batch
from megatron.training.compiler import can_compile

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not can_compile(), reason="needs triton and a C compiler"),
]
HEADS, GROUPS, WIDTH = 8, 2, 64
CASES = {
    "window": (4096, 1, (1000, 0), False),
    "documents": (4096, 2, None, True),
    "both": (4096, 2, (700, 0), True),
    "window of 4096": (8192, 1, (4095, 0), False),
}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr("megatron.core.parallel_state.get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(flex, "_failure", [])


def build(window):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        window_size=window,
    )
    return attention.SDPAttention(config, 1, AttnMaskType.causal, "self")


def case(name, dtype=torch.bfloat16):
    """Return the module, query, key, value, the gradient of the result, and the mask of documents or None."""
    size, batch, window, has_documents = CASES[name]
    generator = torch.Generator(device="cuda").manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    inputs = [draw(size, batch, heads, WIDTH).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    return build(window), inputs, draw(size, batch, HEADS * WIDTH), documents(size, batch) if has_documents else None


def documents(size, batch):
    """Return the mask of documents with borders on and off the blocks."""
    rows = []
    for sample in range(batch):
        lengths = [128, 300, 1, 1024 + sample]
        rows.append(torch.cat([torch.arange(n) for n in [*lengths, size - sum(lengths)]]))
    positions = torch.stack(rows)
    zeros = torch.zeros_like(positions)
    sample = {"tokens": zeros, "labels": zeros, "loss_mask": zeros, "position_ids": positions}
    shape = BatchShape(batch, size, 0, is_packed=True)
    return next_batch(iter([sample]), shape, torch.device("cuda")).attention_mask


def run(module, inputs, upstream, mask):
    """Return output and the three gradients, and the peak of memory above what was there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = module(*inputs, mask)
    grads = torch.autograd.grad(out, inputs, upstream)
    torch.cuda.synchronize()
    return [out.detach(), *grads], torch.cuda.max_memory_allocated() - before


def masked(monkeypatch, module, inputs, upstream, mask):
    with monkeypatch.context() as patch:
        patch.setattr(flex, "is_usable", lambda q, dropout: False)
        return run(module, inputs, upstream, mask)


def error(found, wanted):
    """Return the largest difference in standard deviations of what is wanted."""
    return max(float((f.float() - w.float()).abs().max() / w.float().std()) for f, w in zip(found, wanted))


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(monkeypatch, name):
    """As near to the masked definition in fp32 as the masked kernel in bf16 is."""
    module, inputs, upstream, mask = case(name)
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    wanted, _ = masked(monkeypatch, module, exact, upstream.float(), mask)
    by_mask, _ = masked(monkeypatch, module, inputs, upstream, mask)
    found, _ = run(module, inputs, upstream, mask)
    assert not flex._failure, flex._failure
    assert len(found) == len(wanted) == 4
    for one, other, true in zip(found, by_mask, wanted):
        assert error([one], [true]) <= 1.5 * error([other], [true]) + 1e-2


def test_other_window_is_seen(monkeypatch):
    """The comparison can fail: a window one block too wide is far out of the bound."""
    module, inputs, upstream, mask = case("window")
    found, _ = run(module, inputs, upstream, mask)
    wanted, _ = masked(monkeypatch, build((1128, 0)), inputs, upstream, mask)
    assert error(found, wanted) > 0.5


def test_memory(monkeypatch):
    """At sequence 8192 the mask and its copies are gone."""
    module, inputs, upstream, mask = case("window of 4096")
    run(module, inputs, upstream, mask)  # compiles
    _, with_flex = run(module, inputs, upstream, mask)
    _, with_mask = masked(monkeypatch, module, inputs, upstream, mask)
    print(f"peak {with_flex / 2**20:.0f} MiB with flex_attention, {with_mask / 2**20:.0f} MiB with a mask")
    assert with_flex + 8192**2 <= with_mask, "at least the bool mask is saved"


def test_time(monkeypatch):
    """Forward and backward at sequence 8192 with a window of 1024: prints both times, and flex is not slower."""
    _, inputs, upstream, _ = case("window of 4096")
    module = build((1023, 0))

    def median(call):
        times = []
        for _ in range(8):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times[2:])[3]

    with_flex = median(lambda: run(module, inputs, upstream, None))
    with_mask = median(lambda: masked(monkeypatch, module, inputs, upstream, None))
    assert not flex._failure, flex._failure
    print(f"{with_flex:.2f} ms with flex_attention, {with_mask:.2f} ms with a mask")
    assert with_flex < with_mask


def test_evaluation_and_recompute():
    """Without gradients, and computed again in the backward pass, the same bits come out."""
    module, inputs, upstream, mask = case("documents")
    found, _ = run(module, inputs, upstream, mask)
    with torch.no_grad():
        assert torch.equal(module(*inputs, mask), found[0])
    # Reentrant, as megatron-core recomputes layers.
    torch.utils.checkpoint.checkpoint(module, *inputs, mask, use_reentrant=True).backward(upstream)
    for tensor, other in zip(inputs, found[1:]):
        torch.testing.assert_close(tensor.grad, other)


def test_deterministic_mode_uses_the_mask(monkeypatch):
    """Under deterministic algorithms nothing is handed to flex_attention."""
    module, inputs, upstream, mask = case("window")
    monkeypatch.setattr(flex, "attend", None)
    torch.use_deterministic_algorithms(True)
    try:
        first, _ = run(module, inputs, upstream, mask)
        second, _ = run(module, inputs, upstream, mask)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(first, second))
