"""flex_attention's masks against explicit ones, bit by bit, and the way back to a mask where it fails."""

from __future__ import annotations

import itertools

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatron.training import attention, flex
from megatron.training.batch import BatchShape, next_batch

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = 3 * flex.BLOCK
CPU = torch.device("cpu")
WINDOWS = [0, 1, 20, 127, 128, 129, 200, 256, SIZE - 2]


def documents(lengths):
    """Return the mask [batch, 1, seq, seq] that a batch of documents of these lengths has in training."""
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    zeros = torch.zeros_like(positions)
    batch = {"tokens": zeros, "labels": zeros, "loss_mask": zeros, "position_ids": positions}
    return next_batch(iter([batch]), BatchShape(len(lengths), SIZE, 0, is_packed=True), CPU).attention_mask


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """`next_batch` asks for the tensor-parallel size alone."""
    monkeypatch.setattr("megatron.core.parallel_state.get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(flex, "_failure", [])


LENGTHS = [[[SIZE], [1, SIZE - 1]], [[100, 28, 128, 128], [127, 2, 255]], [[128, 128, 128], [5] * 76 + [4]]]


def visible_by_rule(starts, heads=1):
    """Return bool [batch, 1, seq, seq] by asking for each score."""
    rule = flex.score_rule(starts)
    grid = torch.meshgrid(
        torch.arange(starts.size(0)), torch.arange(heads), torch.arange(SIZE), torch.arange(SIZE), indexing="ij"
    )
    return rule(*grid)


def visible_by_blocks(blocks):
    """Return bool [batch, 1, seq, seq] that a kernel computes: whole blocks unasked, parts by the rule."""
    batch, count = blocks.kv_num_blocks.size(0), SIZE // flex.BLOCK
    out = torch.zeros(batch, 1, SIZE, SIZE, dtype=torch.bool)
    inside = torch.arange(flex.BLOCK)
    for b, i in itertools.product(range(batch), range(count)):
        rows = (i * flex.BLOCK + inside)[:, None]
        parts = blocks.kv_indices[b, 0, i, : blocks.kv_num_blocks[b, 0, i]].tolist()
        whole = blocks.full_kv_indices[b, 0, i, : blocks.full_kv_num_blocks[b, 0, i]].tolist()
        assert not set(parts) & set(whole)
        for j in parts + whole:
            columns = (j * flex.BLOCK + inside)[None, :]
            seen = (
                torch.tensor(True) if j in whole else blocks.mask_mod(torch.tensor(b), torch.tensor(0), rows, columns)
            )
            out[b, 0, rows, columns] = seen.expand(flex.BLOCK, flex.BLOCK)
    return out


def same_lists(blocks, wanted):
    """Whether two masks list the same blocks, for rows and for columns."""
    names = ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")
    lists = ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices")
    for count_name, list_name in zip(names, lists):
        counts = getattr(blocks, count_name)
        if not torch.equal(counts, getattr(wanted, count_name)):
            return False
        for place in itertools.product(*map(range, counts.shape)):
            n = counts[place]
            if not torch.equal(getattr(blocks, list_name)[place][:n], getattr(wanted, list_name)[place][:n]):
                return False
    return True


@pytest.mark.parametrize("back", WINDOWS)
def test_windows(back):
    """Rule, blocks and torch's own block lists are those of the explicit mask, for every kind of window."""
    wanted = attention._window(SIZE, (back, 0), CPU)
    starts = flex.window_starts(SIZE, back, CPU)
    assert torch.equal(visible_by_rule(starts)[0, 0], wanted)
    blocks = flex.blocks_of(starts)
    assert torch.equal(visible_by_blocks(blocks)[0, 0], wanted)
    assert same_lists(blocks, create_block_mask(flex.score_rule(starts), None, None, SIZE, SIZE, "cpu"))


@pytest.mark.parametrize("back", [None, 20, 150])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_documents(lengths, back):
    """The same for documents in a batch, with and without a window."""
    mask = documents(lengths)
    wanted = ~mask if back is None else ~mask & attention._window(SIZE, (back, 0), CPU)
    blocks = flex.DocumentBlocks().get(mask, back)
    assert torch.equal(visible_by_blocks(blocks), wanted)
    assert torch.equal(flex.document_starts(mask), (~mask).squeeze(1).to(torch.int8).argmax(-1).int())
    assert same_lists(blocks, create_block_mask(blocks.mask_mod, len(lengths), None, SIZE, SIZE, "cpu"))


def test_wrong_start_is_seen():
    """The comparisons can fail: a window one too wide is another mask and, across a border, other blocks."""
    wanted = attention._window(SIZE, (127, 0), CPU)
    blocks = flex.blocks_of(flex.window_starts(SIZE, 128, CPU))
    assert not torch.equal(visible_by_blocks(blocks)[0, 0], wanted)
    assert not same_lists(blocks, flex.blocks_of(flex.window_starts(SIZE, 300, CPU)))


def test_blocks_of_a_micro_batch_are_made_once():
    """All layers share the blocks of one mask; another mask or window gets its own."""
    cache, mask = flex.DocumentBlocks(), documents(LENGTHS[1])
    first = cache.get(mask, None)
    assert cache.get(mask, None) is first
    assert cache.get(mask, 20) is not first
    assert torch.equal(visible_by_blocks(cache.get(documents(LENGTHS[2]), None)), ~documents(LENGTHS[2]))
    assert flex.window_blocks(SIZE, 20, CPU) is flex.window_blocks(SIZE, 20, CPU)


def build(window):
    """Return the attention module: 4 heads in 2 groups of width 16."""
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0,
        window_size=window,
    )  # fmt: skip
    return attention.SDPAttention(config, 1, AttnMaskType.causal, "self")


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, 2, heads, 16, generator=generator) for heads in (4, 2, 2)]


def use_flex(monkeypatch, function):
    monkeypatch.setattr(flex, "is_usable", lambda q, dropout: not flex._failure)
    monkeypatch.setattr(flex, "can_compile", lambda: True)
    monkeypatch.setattr(flex, "_compiled", lambda: function)


@pytest.mark.parametrize(("window", "lengths"), [((150, 0), None), (None, LENGTHS[1]), ((20, 0), LENGTHS[1])])
def test_module_through_flex(monkeypatch, window, lengths):
    """The module gives flex_attention what makes the same result as a mask."""
    mask = None if lengths is None else documents(lengths)
    module, inputs, calls = build(window), tensors(), []

    def eager(q, k, v, **options):
        calls.append(options)
        return flex_attention(q, k, v, **options)

    with torch.no_grad():
        wanted = module(*inputs, mask)
        use_flex(monkeypatch, eager)
        found = module(*inputs, mask)
    assert len(calls) == 1 and calls[0]["enable_gqa"]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_failure_ends_in_a_mask(monkeypatch, capsys):
    """Where flex_attention cannot be compiled a mask does the work, and one line says so once."""

    def broken(*args, **options):
        raise RuntimeError("no compiler\nmore")

    module, inputs = build((20, 0)), tensors()
    wanted = module(*inputs, None)
    use_flex(monkeypatch, broken)
    assert torch.equal(module(*inputs, None), wanted)
    assert torch.equal(module(*inputs, None), wanted)
    assert capsys.readouterr().out.count("flex_attention failed (RuntimeError: no compiler)") == 1


def test_missing_compiler_ends_in_a_mask(monkeypatch, capsys):
    """Without a compiler nothing is tried."""
    use_flex(monkeypatch, None)
    monkeypatch.setattr(flex, "can_compile", lambda: False)
    module, inputs = build((20, 0)), tensors()
    module(*inputs, None)
    assert "triton or a C compiler is missing" in capsys.readouterr().out


def test_full_memory_is_no_failure_to_compile(monkeypatch):
    """A GPU that is full says so, instead of asking for the larger mask."""

    def full(*args, **options):
        raise torch.OutOfMemoryError("full")

    use_flex(monkeypatch, full)
    with pytest.raises(torch.OutOfMemoryError):
        build((20, 0))(*tensors(), None)


def test_where_flex_is_used(monkeypatch):
    """Never on the CPU, in fp32, with dropout, in deterministic mode, or for short or ragged sequences."""

    class OnGPU:
        def __init__(self, size=4096, dtype=torch.bfloat16, is_cuda=True):
            self.is_cuda, self.dtype, self._size = is_cuda, dtype, size

        def size(self, axis):
            return self._size

    # What tests before this one left behind.
    monkeypatch.setattr(flex, "_failure", [])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    assert flex.is_usable(OnGPU(), 0.0)
    assert not flex.is_usable(OnGPU(is_cuda=False), 0.0)
    assert not flex.is_usable(OnGPU(dtype=torch.float32), 0.0)
    assert not flex.is_usable(OnGPU(), 0.1)
    assert not flex.is_usable(OnGPU(size=1024), 0.0)
    assert not flex.is_usable(OnGPU(size=4097), 0.0)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not flex.is_usable(OnGPU(), 0.0)


def test_new_documents_do_not_compile_again(monkeypatch):
    """Each micro-batch has its own documents, and one compiled function serves them all, and all layers."""
    compiled = torch.compile(flex_attention, dynamic=False, backend="eager")
    use_flex(monkeypatch, compiled)
    inputs, layers = tensors(), [build((150, 0)), build((150, 0))]
    with torch.no_grad():
        layers[0](*inputs, documents(LENGTHS[0]))
        torch.compiler.set_stance("fail_on_recompile")
        try:
            for lengths in (*LENGTHS, [[384], [384]], [[1] * 384, [2] * 192]):
                for layer in layers:
                    layer(*inputs, documents(lengths))
            assert not flex._failure
            layers[0](*(tensor[:, :1].clone() for tensor in inputs), documents(LENGTHS[0][:1]))
            assert flex._failure, "the test sees that another batch size is compiled again"
        finally:
            torch.compiler.set_stance("default")
