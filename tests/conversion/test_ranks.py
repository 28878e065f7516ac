"""A converted model on real ranks: logits and gradients equal transformers' under every layout."""

from __future__ import annotations

import pytest
import torch

from megatron.training.conversion.architectures import heads_of
from megatron.training.conversion.importer import import_checkpoint, open_model
from megatron.training.conversion.parity import BOUND
from tests.conversion import tiny_models
from tests.conversion.rank_cases import logits_and_gradients
from tests.rank_pool import RankPool

# Layouts of the default run: each size of both kinds, tied and untied ends on different ranks.
QUICK = [
    ("llama3", 2, 2),
    ("mistral", 4, 1),
    ("qwen2", 2, 2),
    ("qwen3", 4, 1),
    ("neox", 2, 2),
    ("llama_tied", 1, 2),
]
LAYOUTS = [(tensor, pipeline) for tensor in (1, 2, 4) for pipeline in (1, 2)]
PRODUCT = [(name, *layout) for name in tiny_models.MODELS for layout in LAYOUTS]


@pytest.fixture(scope="module")
def pool():
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def big_pool():
    with RankPool(8) as pool:
        yield pool


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Return a function from a model's name to (source folder, our folder, tokens, logits, gradients of the source)."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = tiny_models.build(name, groups=4)
            tiny_models.save(model, folder / "hf")
            import_checkpoint(folder / "hf", folder / "ours")
            tokens = torch.randint(0, 101, (2, tiny_models.SEQ_LENGTH), generator=torch.Generator().manual_seed(3))
            with torch.no_grad():
                logits = model(tokens).logits
            loss = torch.nn.functional.cross_entropy(
                model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()
            )
            loss.backward()
            # transformers 5 names GPT-NeoX's output layer otherwise in memory than in files.
            gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
            gradients["embed_out.weight"] = gradients.get("embed_out.weight", gradients.get("lm_head.weight"))
            made[name] = (folder / "hf", folder / "ours", tokens, logits, gradients)
        return made[name]

    return get


def our_name(rule):
    """Return the parameter that a rule's key names in the model."""
    name = rule.key.replace("decoder.layers.", f"decoder.layers.{rule.layer}.")
    for fused, plain in (
        ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
        ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ):
        name = name.replace(fused, plain)
    return name


def check(pool, case, tensor, pipeline):
    hf, ours, tokens, reference, gradients = case
    results = pool.run(logits_and_gradients, ours, tokens, tensor, pipeline, ranks=tensor * pipeline)
    everyone = [logits for logits, _ in results if logits is not None]
    assert len(everyone) == tensor
    for logits in everyone:
        assert (logits - reference).abs().max() / reference.std() <= BOUND
    found = {}
    for _, part in results:
        for key, gradient in part.items():
            assert torch.equal(found.setdefault(key, gradient), gradient), f"ranks differ in {key}"
    source = open_model(hf)
    assert found.keys() == {our_name(rule) for rule in source.rules}
    for rule in source.rules:
        parts = [gradients[part.name] for part in rule.parts]
        wanted = source.architecture.pack(rule, parts, heads_of(source.model))
        error = (found[our_name(rule)] - wanted).abs().max() / wanted.std()
        assert error <= BOUND, f"the gradient of {rule.key}, layer {rule.layer}, is off by {error}"


@pytest.mark.parametrize(("name", "tensor", "pipeline"), QUICK)
def test_logits_and_gradients(pool, converted, name, tensor, pipeline):
    """On several ranks a model computes transformers' logits and the gradients of one batch."""
    check(pool, converted(name), tensor, pipeline)


@pytest.mark.full
@pytest.mark.parametrize(("name", "tensor", "pipeline"), PRODUCT)
def test_every_layout(big_pool, converted, name, tensor, pipeline):
    """The same for every model, tensor-parallel and pipeline size."""
    check(big_pool, converted(name), tensor, pipeline)


def test_wrong_gradient_is_seen(pool, converted):
    """The comparison of gradients itself can fail: those of another batch are refused."""
    hf, ours, tokens, reference, gradients = converted("llama3")
    other = {key: value.roll(1, 0) for key, value in gradients.items()}
    with pytest.raises(AssertionError, match="the gradient of"):
        check(pool, (hf, ours, tokens, reference, other), 1, 1)
