"""Every setting reaches code that acts on it: none is accepted and then forgotten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.training.flags import all_flags
from megatron.training.flags_accepted import NOT_YET

ROOT = Path(__file__).parents[2]

# Read inside the config classes and the parser, which turn them into what the code asks for.
DERIVED = {
    "accumulate_allreduce_grads_in_fp32": "PrecisionConfig.grad_buffer_dtype",
    "ckpt_format": "one value only",
    "grad_reduce_in_bf16": "PrecisionConfig.grad_buffer_dtype",
    "lr_decay_iters": "TrainingConfig.lr_samples",
    "lr_decay_samples": "TrainingConfig.lr_samples",
    "lr_warmup_fraction": "TrainingConfig.lr_samples",
    "lr_warmup_iters": "TrainingConfig.lr_samples",
    "lr_warmup_samples": "TrainingConfig.lr_samples",
    "lr_wsd_decay_iters": "TrainingConfig.lr_samples",
    "lr_wsd_decay_samples": "TrainingConfig.lr_samples",
    "make_vocab_size_divisible_by": "ModelConfig.padded_vocab_size",
    "num_layers_per_virtual_pipeline_stage": "ParallelConfig.num_virtual_stages",
    "num_virtual_stages_per_pipeline_rank": "ParallelConfig.num_virtual_stages",
    "rampup_batch_size": "TrainingConfig.batch_phases",
    "step_batch_size_schedule": "TrainingConfig.batch_phases",
    "use_checkpoint_args": "arguments.build_config",
}


def sources() -> str:
    files = [ROOT / "pretrain_gpt.py", *(ROOT / "deep_offload").rglob("*.py"), *(ROOT / "megatron").rglob("*.py")]
    skipped = re.compile(r"training/(config|flags|arguments|explain|shell_)|deep_offload/config\.py")
    return "\n".join(file.read_text() for file in files if not skipped.search(file.as_posix()))


CODE = sources()


@pytest.mark.parametrize("field", [flag.field for flag in all_flags()])
def test_setting_is_read(field):
    """Some code asks for the field, or start-up says that it has no effect; never both."""
    is_read = re.search(rf"\.{field}\b", CODE) is not None or field in DERIVED
    assert is_read != (field in NOT_YET), (
        f"{field} has no effect: build it, or add it to flags_accepted.NOT_YET"
        if not is_read
        else f"{field} is built now: remove it from flags_accepted.NOT_YET"
    )
