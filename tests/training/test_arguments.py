"""The command line: defaults, what is not understood, contradictions, checkpoint arguments, dump and help."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training import flags_rules
from megatron.training.arguments import build_config, parse_args
from megatron.training.config import ModelConfig
from megatron.training.flags import all_flags, flags_by_name
from megatron.training.flags_accepted import MAPPED, NO_EFFECT, ONLY
from megatron.training.flags_dump import config_dump, notes_list, to_megatron_namespace
from megatron.training.flags_help import OURS, help_text
from megatron.training.flags_refused import NOT_BUILT, REFUSED, REFUSED_PREFIXES, refusal
from tests.training.flag_cases import BASE

GOLDEN = Path(__file__).parent / "golden" / "flags.txt"


def config_of(words: str, world_size: int = 2, **more):
    """Build the settings for flags added to BASE."""
    return build_config(f"{BASE} {words}".split(), world_size=world_size, **more)


DEFAULTS = {
    "model.attention_dropout": 0.1,
    "model.hidden_dropout": 0.1,
    "model.normalization": "LayerNorm",
    "model.position_embedding_type": "learned_absolute",
    "model.norm_epsilon": 1e-5,
    "model.init_method_std": 0.02,
    "model.untie_embeddings_and_output_weights": False,
    "model.add_bias_linear": True,
    "model.ffn_hidden_size": 256,
    "model.make_vocab_size_divisible_by": 128,
    "optim.weight_decay": 0.01,
    "optim.adam_beta1": 0.9,
    "optim.adam_beta2": 0.999,
    "optim.adam_eps": 1e-8,
    "optim.clip_grad": 1.0,
    "optim.check_for_nan_in_loss_and_grad": True,
    "lr.lr_decay_style": "linear",
    "lr.min_lr": 0.0,
    "lr.lr_warmup_init": 0.0,
    "logging.eval_iters": 100,
    "logging.eval_interval": 1000,
    "logging.log_interval": 100,
    "lifecycle.seed": 1234,
    "data.num_workers": 2,
    "data.split": "969,30,1",
    "parallel.distributed_timeout_minutes": 10,
    "checkpoint.ckpt_format": "torch_dist",
    "checkpoint.dist_ckpt_strictness": "assume_ok_unexpected",
    "checkpoint.ckpt_fully_parallel_save": True,
    "precision.initial_loss_scale": 2.0**32,
    "precision.hysteresis": 2,
    "precision.loss_scale_window": 1000,
    "offload.interleaved_offload": False,
}


@pytest.mark.parametrize(("path", "value"), DEFAULTS.items(), ids=list(DEFAULTS))
def test_defaults_are_megatrons(path, value):
    """A setting that is not typed has Megatron's default."""
    section, field = path.split(".")
    assert getattr(getattr(config_of(""), section), field) == value


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--num-layer 4", "--num-layer is unknown, did you mean --num-layers?"),
        ("--micro_batch_size 4", "--micro_batch_size is unknown, did you mean --micro-batch-size?"),
        ("--tensor-parallel-size 2", "--tensor-parallel-size is unknown, did you mean --tensor-model-parallel-size?"),
        ("--offload-gpu-shares 1", "--offload-gpu-shares is unknown, did you mean --offload-gpu-share?"),
        ("-bf16", "-bf16 is unknown, did you mean --bf16?"),
        ("--recompute full", "--recompute is unknown, did you mean --recompute-method?"),
        ("--zzz", "--zzz is unknown, and no flag is like it: see --help"),
        ("--lr", "--lr takes one value, but none was given"),
        ("--lr 1 2", "--lr takes one value, but 2 were given: 1 2"),
        ("--bf16 true", "--bf16 takes no value, but 1 was given: true"),
        ("--rampup-batch-size 4 4", "--rampup-batch-size takes 3 values, but 2 were given: 4 4"),
        ("--profile-ranks", "--profile-ranks takes at least one value, but none was given"),
        ("--rotary-base 1e6", "--rotary-base is '1e6', allowed are whole numbers from 0: write 1000000"),
        ("--seed -1", "--seed is '-1', allowed are whole numbers from 0"),
        ("--lr nan", "--lr is 'nan', allowed are numbers"),
        ("--optimizer sgd", "--optimizer is 'sgd', allowed is adam"),
        ("--normalization rms", "--normalization is 'rms', allowed are LayerNorm, RMSNorm"),
        ("--window-size 4", "--window-size is '4', allowed are two whole numbers such as 4095,0"),
        ("--offload-stride some", "--offload-stride is 'some', allowed are auto, none, whole numbers from 0"),
        (
            "--exp-avg-dtype bf16",
            "--exp-avg-dtype is 'bf16', allowed is fp32: optimizer states are fp32 here: drop the flag",
        ),
        (
            "--expert-model-parallel-size 2",
            "--expert-model-parallel-size is '2', allowed is 1: experts are not built here, drop the flag",
        ),
        ("--num-classes 10", "--num-classes is refused, it is not built here: drop it"),
        ("--", "'--' alone is not a flag: remove it"),
    ],
)
def test_what_is_not_understood_is_named(typed, message):
    """A wrong flag or value gets one sentence with what was given and what is allowed."""
    with pytest.raises(ValueError) as caught:
        config_of(typed)
    assert str(caught.value) == message


OFFLOAD = "--interleaved-offload"
CONTRADICTIONS = [
    ("--fp16 --bf16", "--bf16 and --fp16 exclude each other"),
    ("--train-samples 100", "--train-iters and --train-samples both end the run"),
    ("--lr-decay-samples 100", "--lr-decay-samples does not go with --train-iters: use --lr-decay-iters"),
    ("--lr-warmup-samples 10", "--lr-warmup-samples does not go with --train-iters: use --lr-warmup-iters"),
    ("--save out", "--save out without --save-interval never saves: add --save-interval N"),
    ("--save out --save-interval 0", "--save out without --save-interval never saves: add --save-interval N"),
    (
        "--global-batch-size 10",
        "--global-batch-size 10 is not a multiple of --micro-batch-size 2 times the data-parallel size 2",
    ),
    ("--data-path a", "--mock-data and a data path exclude each other"),
    ("--swiglu --squared-relu", "--swiglu and --squared-relu exclude each other"),
    ("--overlap-param-gather", "--overlap-param-gather needs --overlap-grad-reduce"),
    ("--context-parallel-size 2", "--context-parallel-size 2 is not built here, only 1 is allowed"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "--lr-warmup-fraction excludes --lr-warmup-iters"),
    ("--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    ("--min-lr 1", "--min-lr 1.0 is outside of 0..0.001"),
    ("--recompute-granularity full", "--recompute-granularity full needs --recompute-method"),
    (
        "--recompute-activations --recompute-granularity full",
        "--recompute-activations and --recompute-granularity full",
    ),
    ("--no-position-embedding", "--no-position-embedding needs --position-embedding-type rope or none"),
    ("--rampup-batch-size 5 4 60", "--rampup-batch-size 5 4 60 never becomes --global-batch-size 16"),
    ("--rampup-batch-size 2 2 60", "the growing batch size 2 is not a multiple of --micro-batch-size 2 times"),
    (
        "--rampup-batch-size 4 4 60 --step-batch-size-schedule 0:16",
        "--rampup-batch-size and --step-batch-size-schedule",
    ),
    ("--step-batch-size-schedule 0:8,2K:32", "--global-batch-size 16 is not the last batch 32"),
    ("--step-batch-size-schedule 1:16", "--step-batch-size-schedule is '1:16', expected TOKENS:BATCH pairs"),
    ("--tensor-model-parallel-size 4", "the world size 2 is not a multiple of --tensor-model-parallel-size 4 times"),
    ("--pipeline-model-parallel-size 2 --num-layers 3", "--num-layers 3 cannot be cut evenly into 2 pipeline ranks"),
    ("--num-layers-per-virtual-pipeline-stage 1", "virtual stages and an uneven split need"),
    ("--ddp-average-in-collective --calculate-per-token-loss", "--ddp-average-in-collective would average what"),
    ("--offload-gpu-share 0.5", "--offload-gpu-share has a meaning only with --interleaved-offload"),
    ("--offload-num-slots 2", "--offload-num-slots has a meaning only with --interleaved-offload"),
    (f"{OFFLOAD} --offload-num-slots 0", "--offload-num-slots is 0, allowed are auto and whole numbers from 1"),
    (f"{OFFLOAD} --offload-num-slots few", "--offload-num-slots is 'few', allowed are auto, whole numbers from 0"),
    (f"{OFFLOAD} --offload-gpu-share 1.5", "--offload-gpu-share is 1.5, allowed are auto and numbers from 0 to 1"),
    (
        f"{OFFLOAD} --offload-stride 2 --offload-gpu-share 0.5",
        "--offload-stride 2 and --offload-gpu-share 0.5 both choose",
    ),
    (f"{OFFLOAD} --offload-grad-wire param --bf16", "--offload-grad-wire param would round gradients"),
    (f"{OFFLOAD} --offload-grad-wire param", "--offload-grad-wire param would round gradients"),
    ("--optimizer-cpu-offload --offload-gpu-share 0.5", "means --offload-gpu-share 0, but --offload-gpu-share is 0.5"),
    ("--optimizer-cpu-offload --offload-stride 3", "--optimizer-cpu-offload updates everything on the CPU"),
    (
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --offload-resident-fraction 0.7",
        "means --offload-resident-fraction 0.5, but --offload-resident-fraction is 0.7",
    ),
    ("--optimizer-cpu-offload --optimizer-offload-fraction 2", "--optimizer-offload-fraction is '2', allowed are"),
    ("--main-grads-dtype bf16", "--main-grads-dtype bf16 needs --bf16"),
    ("--end-weight-decay 0.1", "--end-weight-decay needs --weight-decay-incr-style linear or cosine"),
    ("--wandb-project p", "--wandb-project needs --wandb-exp-name"),
    ("--use-checkpoint-args --load d", "--use-checkpoint-args is not possible here"),
    ("--lr-warmup-iters 10", "the learning rate warms up for 160 samples, but the decay ends after 160"),
    ("--max-position-embeddings 16", "--max-position-embeddings 16 is less than --seq-length 32"),
    ("--padded-vocab-size 101 --tensor-model-parallel-size 2", "--padded-vocab-size 101 is not a multiple of"),
    ("--split 1,2,x", "--split is '1,2,x', allowed are up to three parts"),
    ("--exit-signal USR1", "--exit-signal USR1 is unknown, allowed are names as SIGTERM"),
    ("--loss-scale 8 --bf16", "--loss-scale 8.0 is for --fp16 only"),
    ("--tokenizer-type BertWordPieceCase", "--tokenizer-type BertWordPieceCase is not built here, allowed are"),
]


@pytest.mark.parametrize(("typed", "message"), CONTRADICTIONS, ids=[typed for typed, _ in CONTRADICTIONS])
def test_contradiction_stops_with_one_sentence_and_code_2(typed, message, capsys):
    """Flags that contradict each other print one line on stderr and exit with code 2."""
    with pytest.raises(SystemExit) as caught:
        parse_args(f"{BASE} {typed}".split(), world_size=2)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pretrain_gpt.py: error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--num-layers 4", "the model's shape is missing: give --num-layers"),
        ("--micro-batch-size 2", "the batch is missing: give --micro-batch-size"),
        ("--train-iters 10", "the length of the run is missing: give --train-iters or --train-samples"),
        ("--lr 1e-3", "the learning rate is missing: give --lr"),
        ("--mock-data", "the data is missing: give --data-path PREFIX, or --mock-data for generated tokens"),
        ("--tokenizer-type NullTokenizer", "the tokenizer is missing: give --tokenizer-type"),
        ("--vocab-size 100", "--tokenizer-type NullTokenizer needs --vocab-size: add it"),
    ],
)
def test_missing_flag_is_asked_for(flag, message):
    """What no run can do without is named before anything starts."""
    with pytest.raises(ValueError, match=message):
        build_config(BASE.replace(flag, "").split(), world_size=2)


RULE_NEEDS = {
    "_position_flags": "--use-rotary-position-embeddings",
    "_attention_flags": "--num-query-groups 2",
    "_recompute_flags": "--recompute-activations",
    "_tokenizer_flags": "--tokenizer-name-or-path /t",
    "_precision_flags": "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
    "_parallel_flags": "--sequence-parallel",
    "_transformer_engine_flags": "--tp-comm-overlap",
    "_flags_not_built_yet": "--ckpt-fully-parallel-load",
    "_offload_flags": "--optimizer-cpu-offload",
    "_decay_flags": "--end-weight-decay 0.1",
    "_needed_flags": "--lr-warmup-iters 2",
}


@pytest.mark.parametrize("rule", flags_rules._RULES, ids=lambda rule: rule.__name__)
def test_every_rule_is_needed(rule, monkeypatch):
    """Without any one rule some command line would come out differently: the tests here would notice."""

    def outcome() -> object:
        words = BASE.replace("--lr 1e-3", "") if rule.__name__ == "_needed_flags" else BASE
        try:
            return build_config(f"{words} {RULE_NEEDS[rule.__name__]}".split(), world_size=2)
        except ValueError as error:
            return str(error)

    before = outcome()
    monkeypatch.setattr(flags_rules, "_RULES", tuple(other for other in flags_rules._RULES if other is not rule))
    assert outcome() != before


def test_the_last_of_repeated_flags_counts():
    """A flag given twice has its last value, and = is the same as a space."""
    assert config_of("--lr 1 --lr=0.5").lr.lr == 0.5


def test_one_sentence_per_host(capsys, monkeypatch):
    """Only the first rank of a host prints a usage error; all exit with code 2."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(SystemExit) as caught:
        parse_args(["--nonsense"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == ""


def test_megatron_changes_are_told():
    """What Megatron changes silently is changed here too, and said."""
    config = config_of("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32 --sequence-parallel")
    assert config.precision.grad_buffer_dtype == "bf16" and not config.parallel.sequence_parallel
    assert config.notes == (
        "--accumulate-allreduce-grads-in-fp32: dropped because --grad-reduce-in-bf16 is given, as Megatron does",
        "--sequence-parallel: turned off because --tensor-model-parallel-size is 1",
    )
    numbered = notes_list(config_of("--use-mcore-models --use-mcore-models --use-dist-ckpt"))
    assert len(numbered) == 3
    assert numbered[1] == (
        "  1. --use-mcore-models: accepted, no effect because megatron-core's models are the only ones here"
    )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("rope", "rope counts places in the sample"),
        ("none", "--position-embedding-type none learns none"),
        ("learned_absolute", None),
    ],
)
def test_positions_that_are_not_read(kind, reason):
    """--reset-position-ids says that it changes nothing where megatron-core does not read the position ids."""
    notes = config_of(f"--reset-position-ids --position-embedding-type {kind}").notes
    note = f"--reset-position-ids: accepted, no effect because {reason}; use --reset-attention-mask to keep documents "
    assert notes == (() if reason is None else (f"{note}apart",))


def test_megatrons_offload_flags_become_ours():
    """Megatron names the offloaded part, ours is the part that stays."""
    offload = config_of("--optimizer-cpu-offload --optimizer-offload-fraction 0.75").offload
    assert (offload.interleaved_offload, offload.offload_gpu_share) == (True, 0.0)
    assert offload.offload_resident_fraction == 0.25
    both = config_of(
        "--optimizer-cpu-offload --interleaved-offload --offload-gpu-share 0 --offload-num-slots 2"
    ).offload
    assert both.offload_resident_fraction == 0.0 and both.offload_num_slots == 2


def test_tokenizers_under_other_names():
    """The names that relatives of Megatron give to HuggingFace tokenizers are understood."""
    data = config_of("--tokenizer-type PretrainedFromHF --tokenizer-name-or-path /t").data
    assert (data.tokenizer_type, data.tokenizer_model) == ("HuggingFaceTokenizer", "/t")
    assert config_of("--tokenizer-name-or-path /t --tokenizer-model /u").data.tokenizer_model == "/u"


def test_checkpoint_args_fill_the_shape():
    """--use-checkpoint-args takes sizes that were not typed and function-defining settings always."""
    saved = {
        "num_layers": 6,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "seq_length": 64,
        "swiglu": True,
        "layernorm_epsilon": 1e-6,
        "position_embedding_type": "rope",
        "lr": 7.0,
        "window_size": [15, 0],
    }
    words = "--micro-batch-size 2 --train-iters 5 --lr 1e-3 --mock-data --vocab-size 9 --tokenizer-type NullTokenizer"
    words += " --use-checkpoint-args --load here --seq-length 32 --norm-epsilon 1e-5 --ckpt-step 7"
    asked = []
    config = build_config(words.split(), read_checkpoint_args=lambda checkpoint: asked.append(checkpoint) or saved)
    assert (asked[0].load, asked[0].ckpt_step) == ("here", 7)
    model = config.model
    assert (model.num_layers, model.hidden_size, model.seq_length, model.swiglu) == (6, 96, 32, True)
    assert model.norm_epsilon == 1e-6 and model.window_size == (15, 0) and config.lr.lr == 1e-3
    assert config.notes == ("--norm-epsilon: 1e-05 is replaced by the checkpoint's 1e-06",)


# Another value than the default for each setting of a model that changes what its weights compute.
OTHER_FUNCTION = {
    "num_layers": 6,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "max_position_embeddings": 96,
    "ffn_hidden_size": 200,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 32,
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "rotary_percent": 0.5,
    "rotary_interleaved": True,
    "rotary_seq_len_interpolation_factor": 4,
    "use_rope_scaling": True,
    "rope_scaling_factor": 32.0,
    "rope_scaling_low_freq_factor": 2.0,
    "rope_scaling_high_freq_factor": 5.0,
    "rope_scaling_original_max_position_embeddings": 64,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "apply_layernorm_1p": True,
    "swiglu": True,
    "squared_relu": True,
    "openai_gelu": True,
    "bias_gelu_fusion": False,
    "parallel_residual": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "qk_layernorm": True,
    "window_size": (15, 0),
    "untie_embeddings_and_output_weights": True,
    "apply_query_key_layer_scaling": True,
}
# The run's own: how long samples are, what is dropped, how weights start and are padded, which layers compute.
OF_THE_RUN = {
    "seq_length",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
    "transformer_impl",
    "use_cpu_initialization",
}


def test_every_setting_of_the_model_is_named():
    """A new setting of the model is either taken from a checkpoint, and tested below, or named as the run's own."""
    assert {item.name for item in dataclasses.fields(ModelConfig)} == OTHER_FUNCTION.keys() | OF_THE_RUN


@pytest.mark.parametrize("name", OTHER_FUNCTION)
def test_checkpoint_args_give_the_function(name):
    """--use-checkpoint-args gives every setting that changes what the weights compute."""
    shape = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 9}
    needs = {"num_query_groups": {"group_query_attention": True}}
    saved = shape | {"tokenizer_type": "NullTokenizer"} | needs.get(name, {}) | {name: OTHER_FUNCTION[name]}
    words = "--micro-batch-size 2 --train-iters 5 --lr 1e-3 --mock-data --use-checkpoint-args --load d"
    config = build_config(words.split(), read_checkpoint_args=lambda checkpoint: saved)
    assert getattr(config.model, name) == OTHER_FUNCTION[name]


def test_namespace_round_trip():
    """What is written into a checkpoint's args builds the same model again through --use-checkpoint-args."""
    shape = "--swiglu --group-query-attention --num-query-groups 2 --position-embedding-type rope --window-size 7,0"
    first = config_of(f"{shape} --norm-epsilon 1e-6 --apply-layernorm-1p --normalization RMSNorm")
    saved = to_megatron_namespace(first)
    assert saved["layernorm_epsilon"] == 1e-6 and saved["params_dtype"] == "fp32" and saved["window_size"] == [7, 0]
    assert all(isinstance(value, (type(None), bool, int, float, str, list)) for value in saved.values())
    words = "--micro-batch-size 2 --train-iters 5 --lr 1e-3 --mock-data --use-checkpoint-args --load d"
    again = build_config(words.split(), read_checkpoint_args=lambda checkpoint: saved)
    assert again.model == first.model
    assert again.data.tokenizer_type == "NullTokenizer" and again.data.vocab_size == 100


def test_dump_lists_every_setting():
    """The dump of all arguments has Megatron's frame and dots, every field once, sorted."""
    lines = config_dump(config_of("--bf16"))
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[-1] == "-------------------- end of arguments ---------------------"
    assert "  bf16 ............................................ True" in lines
    names = [line.split()[0] for line in lines[1:-1]]
    assert names == sorted(names, key=str.lower) and len(names) == len(set(names))
    assert {flag.field for flag in all_flags()} <= set(names)


def test_field_names_are_unique():
    """No field name exists in two sections: the dump and the namespace are flat."""
    fields = [flag.field for flag in all_flags()]
    assert len(fields) == len(set(fields))


def test_tables_of_flags_do_not_overlap():
    """A flag has one meaning: sets a field, is mapped, has no effect, or is refused."""
    tables = [set(flags_by_name()), set(MAPPED), set(NO_EFFECT), set(ONLY)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    for name in set().union(*tables):
        assert refusal(name) is None, name
    assert not set(REFUSED) & NOT_BUILT
    assert all(text[-1] != "." and ":" in text for text in [*REFUSED.values(), *REFUSED_PREFIXES.values()])


def test_help_shows_every_flag_ours_first():
    """--help lists each spelling once, groups ours first, and shows defaults and the two meanings of fraction."""
    text = help_text("pretrain_gpt.py")
    for name in flags_by_name():
        assert f"  {name}" in text or f", {name}" in text
    for field in OURS:
        assert field in {flag.field for flag in all_flags()}
    assert (
        text.index("--interleaved-offload") < text.index("\nours:") < text.index("--dry-run") < text.index("\nmodel:")
    )
    assert "STAYS" in text and "(default: 0.999)" in text
    assert max(map(len, text.splitlines())) <= 120


def test_help_exits_0(capsys):
    """--help prints and ends well, whatever else is typed."""
    with pytest.raises(SystemExit) as caught:
        parse_args(["--nonsense", "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: pretrain_gpt.py")


def test_adding_a_flag_is_deliberate():
    """The list of all accepted flags is frozen: change golden/flags.txt together with the flags."""
    names = sorted({*flags_by_name(), *MAPPED, *NO_EFFECT, *ONLY})
    assert GOLDEN.read_text().split() == names


def test_no_torch_is_imported():
    """The command line needs neither torch nor megatron-core: mistakes are told at once."""
    code = (
        "import sys; from megatron.training.arguments import build_config; import megatron.training.explain\n"
        f"build_config({BASE.split()!r})\n"
        "bad = {'torch', 'numpy', 'megatron.core', 'triton', 'argparse'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])
