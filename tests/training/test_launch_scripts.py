"""Launch scripts in the shapes that users bring are read, explained and accepted; explain says what would happen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.arguments import build_config
from megatron.training.explain import explain, main, report_lines
from megatron.training.shell_values import shown
from megatron.training.shell_walk import find_commands

SCRIPTS = Path(__file__).parent / "scripts"
ALL = sorted(path.name for path in SCRIPTS.glob("*.sh"))

# What each script must come to: ranks for which the flags fit, and some settings.
EXPECTED = {
    "gpt3_13b.sh": (
        8,
        {
            "model.ffn_hidden_size": 20480,
            "data.tokenizer_type": "GPT2BPETokenizer",
            "precision.loss_scale": None,
            "batch.rampup_batch_size": (32, 32, 5000000),
            "recompute.recompute_granularity": "selective",
        },
    ),
    "llama2_7b.sh": (8, {"model.num_query_groups": 32, "parallel.sequence_parallel": True, "optim.adam_beta2": 0.95}),
    "llama3_8b.slurm.sh": (
        8,
        {
            "batch.train_samples": 15000000000000 // 8192,
            "model.num_query_groups": 8,
            "parallel.num_layers_per_virtual_pipeline_stage": 4,
            "lr.lr_warmup_samples": 8192000,
            "lifecycle.exit_signal": "SIGUSR1",
            "precision.grad_reduce_in_bf16": True,
        },
    ),
    "mistral_7b.sh": (
        8,
        {
            "model.window_size": (4095, 0),
            "lr.lr_warmup_iters": 50,
            "precision.bf16": True,
            "model.position_embedding_type": "rope",
            "recompute.recompute_method": "uniform",
        },
    ),
    "neox_20b.sh": (
        8,
        {
            "model.rotary_percent": 0.25,
            "offload.interleaved_offload": True,
            "batch.step_batch_size_schedule": "0:512 4B:1024 12B:1536",
            "offload.offload_host_budget_gib": 400.0,
            "lifecycle.deterministic_mode": True,
        },
    ),
    "qwen2_14b.sh": (
        8,
        {
            "data.data_path": (
                "0.6",
                "/data/qwen/web_text_document",
                "0.3",
                "/data/qwen/code_text_document",
                "0.1",
                "/data/qwen/math_text_document",
            ),
            "offload.offload_gpu_share": 0.0,
            "offload.offload_resident_fraction": 0.0,
            "lr.lr_wsd_decay_iters": 2000,
            "data.padded_vocab_size": 152064,
        },
    ),
}


def flags_of(name: str) -> list[str]:
    """Return the words behind the .py file of a script, open values shown."""
    [words] = [words for words in find_commands((SCRIPTS / name).read_text()) if "--num-layers" in words]
    at = next(index for index, word in enumerate(words) if word.endswith(".py"))
    flags = [shown(word) for word in words[at + 1 :]]
    return [word for word in flags if word not in ("$EXTRA_ARGS", "$log_options")]


def test_every_script_has_its_expectation():
    """No script of the folder is left untested."""
    assert list(EXPECTED) == ALL


@pytest.mark.parametrize("name", ALL)
def test_script_is_accepted_unchanged(name):
    """The flags that the script would pass build settings, with and without interleaved offload."""
    num_ranks, wanted = EXPECTED[name]
    argv = flags_of(name)
    config = build_config(argv, world_size=num_ranks)
    for path, value in wanted.items():
        section, field = path.split(".")
        assert getattr(getattr(config, section), field) == value, path
    assert build_config([*argv, "--interleaved-offload"], world_size=num_ranks).offload.interleaved_offload


@pytest.mark.parametrize("name", ALL)
def test_script_is_explained_without_surprise(name, capsys):
    """explain ends with code 0 and a verdict for every flag."""
    assert main([str(SCRIPTS / name)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "no surprises" and "the flags fit together (checked for 8 ranks)" in out
    explanation = explain((SCRIPTS / name).read_text())
    assert len(explanation.flags) == sum(word.startswith("--") for word in flags_of(name))


SCRIPT = """
TP=$1
ARGS=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32   # the model
      --micro-batch-size 1 --train-iters 5 --lr 1e-3 --mock-data)
if [[ "$USE_FP8" == "1" ]]; then ARGS+=(--fp8-format hybrid); fi
ARGS+=(--tokenizer-type NullTokenizer --vocab-size 100 --tensor-model-parallel-size $TP)
torchrun --nproc_per_node=8 --nnodes 1 pretrain_gpt.py ${ARGS[@]} %s
"""


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("--bf16", "  used       --bf16"),
        ("--use-flash-attn", "  no effect  --use-flash-attn: because"),
        ("--recompute-activations", "  mapped     --recompute-activations: sets --recompute-granularity selective"),
        (
            "--num-experts 8",
            "  refused    --num-experts 8: mixtures of experts are not built here: train a dense model",
        ),
        ("--context-parallel-size 2", "  refused    --context-parallel-size 2: --context-parallel-size 2 is not built"),
        ("--seq-len 5", "  unknown    --seq-len 5: --seq-len is unknown, did you mean --seq-length?"),
        ("--lr 1e-3 5", "  refused    --lr 1e-3 5: --lr takes one value, but 2 were given: 1e-3 5"),
        ("--optimizer sgd", "  refused    --optimizer sgd: --optimizer is 'sgd', allowed is adam"),
    ],
)
def test_each_flag_gets_its_verdict(more, line):
    """A flag is used, mapped, without effect, refused or unknown, with the reason."""
    explanation = explain(SCRIPT % more, ["2"])
    lines = report_lines("s.sh", explanation)
    assert any(text.startswith(line) for text in lines), lines
    surprised = line.split()[0] in ("refused", "unknown")
    assert (explanation.num_surprises > 0) == surprised


def test_contradiction_is_a_surprise():
    """Flags that are fine one by one and do not fit together are told with the sentence of the command line."""
    explanation = explain(SCRIPT % "--bf16 --fp16", ["2"])
    assert explanation.contradiction == "--bf16 and --fp16 exclude each other: give only one of them"
    assert explanation.num_surprises == 1


def test_open_values_are_not_guessed():
    """A number that the script does not fix is shown by its name, and nothing is concluded from it."""
    explanation = explain(SCRIPT % "--bf16")
    assert explanation.open_values == ("1",) and explanation.num_ranks is None
    assert [flag.words for flag in explanation.flags if flag.name == "--tensor-model-parallel-size"] == [("$1",)]
    assert explain(SCRIPT % "--bf16", ["4"]).num_ranks == 8


def test_yaml_test_configurations_are_read():
    """Megatron's own test configurations, with flags as keys, are explained like scripts."""
    text = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --seq-length: 1024
  --micro-batch-size: 4
  --global-batch-size: 32
  --rampup-batch-size: "[8 8 1000]"
  --train-iters: 50
  --lr: 0.00015
  --data-path: ${DATA_PATH}/my-gpt3_00_text_document
  --vocab-file: ${DATA_PATH}/bpe/vocab.json
  --merge-file: ${DATA_PATH}/bpe/merges.txt
  --split: 949,50,1
  --bf16: true # the reason
  --use-mcore-models: true
  --sequence-parallel: false
"""
    explanation = explain(text, is_yaml=True)
    assert explanation.num_surprises == 0 and explanation.num_ranks == 1
    assert explanation.open_values == ("DATA_PATH",)
    assert [flag.name for flag in explanation.flags if flag.verdict == "no effect"] == ["--use-mcore-models"]


def test_errors_of_explain(tmp_path, capsys):
    """A file that is missing or starts no training is one sentence and code 2; no arguments show the usage."""
    empty = tmp_path / "empty.sh"
    empty.write_text("echo hello\n")
    assert main([str(empty)]) == 2
    assert "no training command was found in the script" in capsys.readouterr().err
    assert main([str(tmp_path / "none.sh")]) == 2
    assert re.match(r"explain: error: .*none\.sh cannot be read: No such file", capsys.readouterr().err)
    assert main([]) == 2 and main(["--help"]) == 0


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damaged_scripts_never_hang_or_crash(data):
    """Whatever is cut out of a script or put into it, explain returns or says one sentence."""
    text = (SCRIPTS / data.draw(st.sampled_from(ALL))).read_text()
    start = data.draw(st.integers(0, len(text)))
    text = text[start : data.draw(st.integers(start, len(text)))]
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + data.draw(st.sampled_from(list("\"'`$(){}[];|&<>#\\\n=") + ["$((", "${", "<<E", "if ", "case "]))
            + text[at:]
        )
    try:
        explain(text)
    except ValueError as error:
        assert "\n" not in str(error)
