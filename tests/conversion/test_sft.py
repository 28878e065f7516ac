"""--sft: chats become tokens and targets through the chat template, packed so that chats do not see each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.training.arguments import build_config
from megatron.training.batch import BatchShape, next_batch
from megatron.training.conversion.exporter import OurModel
from megatron.training.conversion.model_args import read_flags_script, training_config
from megatron.training.conversion.parity import load_chunk, reference_model, single_process
from megatron.training.sft import (
    Chat,
    ChatDataset,
    ChatEncoder,
    EncodedChat,
    build_chat_datasets,
    check_chats,
    pack,
    read_chats,
)

ROOT = Path(__file__).resolve().parents[2]
SEQ_LENGTH = 48


def chats(count=9):
    """Return conversations of different lengths, some with several answers."""
    made = []
    for i in range(count):
        messages = [{"role": "system", "content": f"w{i} w2"}] if i % 3 == 0 else []
        for turn in range(1 + i % 2):
            messages.append(
                {"role": "user", "content": " ".join(f"w{(3 * i + turn + k) % 80}" for k in range(2 + i % 4))}
            )
            messages.append(
                {"role": "assistant", "content": " ".join(f"w{(7 * i + k) % 80}" for k in range(1 + i % 5))}
            )
        made.append(messages)
    return made


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in chats()) + "\n\n")
    return path


@pytest.fixture(scope="module")
def encoder(converted):
    return ChatEncoder(str(converted("llama3").ours / "tokenizer"))


def test_targets_are_what_the_assistant_says(encoder):
    """Of each answer the words and the end are targets; roles, questions and the start are not."""
    messages = (
        {"role": "user", "content": "w3 w4"},
        {"role": "assistant", "content": "w5"},
        {"role": "user", "content": "w6"},
        {"role": "assistant", "content": "w7 w8"},
    )
    # The template writes `<s> role words </s>`; a role is an unknown word here.
    encoded = encoder.encode(Chat(messages, "here"))
    unknown, end, start = 0, 1, 2
    words = lambda *numbers: [3 + n for n in numbers]  # noqa: E731 - a shorthand of this test
    assert encoded.tokens == [
        *(start, unknown, *words(3, 4), end, start, unknown, *words(5), end),
        *(start, unknown, *words(6), end, start, unknown, *words(7, 8), end),
    ]
    targets = [token for token, is_target in zip(encoded.tokens, encoded.is_target) if is_target]
    assert targets == [*words(5), end, *words(7, 8), end]


def test_packing_fills_and_separates():
    """Whole chats follow each other, positions start anew, long ones are cut, the rest is padding without loss."""
    lengths = (5, 4, 9, 3, 30)
    encoded = [
        EncodedChat([100 * i + k for k in range(n)], [k >= n // 2 for k in range(n)]) for i, n in enumerate(lengths)
    ]
    samples = list(pack(encoded, 10, padding=7))
    assert [sample.position_ids.tolist() for sample in samples] == [
        [0, 1, 2, 3, 0, 1, 2, 0, 1, 2],
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1],
    ]
    assert samples[0].tokens.tolist() == [0, 1, 2, 3, 100, 101, 102, 7, 7, 7]
    assert samples[0].labels.tolist() == [1, 2, 3, 4, 101, 102, 103, 7, 7, 7]
    assert samples[0].loss_mask.tolist() == [0, 1, 1, 1, 0, 1, 1, 0, 0, 0]
    assert samples[1].tokens.tolist() == [*range(200, 208), 300, 301]
    # The last chat has no target within a sample: it is left out.
    assert all((sample.tokens < 400).all() for sample in samples)


def test_passes_have_their_own_order():
    """Each pass shows every sample once, in an order that differs from the last pass and is the same in each run."""
    encoded = [EncodedChat([i, i + 1, i + 2], [False, True, True]) for i in range(0, 60, 3)]
    samples = list(pack(encoded, 2, padding=0))
    one, again = ChatDataset(samples, 50, seed=3), ChatDataset(samples, 50, seed=3)
    order = [int(one[i]["tokens"][0]) for i in range(50)]
    assert len(samples) == 20 and sorted(order[:20]) == sorted(order[20:40]) == sorted(range(0, 60, 3))
    assert order[:20] != order[20:40]
    assert [int(again[i]["tokens"][0]) for i in reversed(range(50))] == order[::-1]


def test_loss_is_that_of_transformers(converted, encoder, file):
    """The loss of a packed batch equals transformers' over the same chats one by one, to 1e-4."""
    model = converted("llama3")
    encoded = [encoder.encode(chat) for chat in read_chats([str(file)])]
    samples = list(pack(encoded, SEQ_LENGTH, padding=1))
    assert 2 <= len(samples) < len(encoded), "several chats share a sample"
    reference = reference_model(model.hf)
    total, count = 0.0, 0
    with torch.no_grad():
        for chat in encoded:
            labels = torch.tensor([[t if is_target else -100 for t, is_target in zip(chat.tokens, chat.is_target)]])
            targets = int((labels[:, 1:] >= 0).sum())
            total += float(reference(torch.tensor([chat.tokens]), labels=labels).loss) * targets
            count += targets
    ours = OurModel(model.ours)
    config = training_config(ours.model, ours.vocab_rows)
    keys = ("tokens", "labels", "loss_mask", "position_ids")
    batch = {key: torch.stack([getattr(sample, key) for sample in samples]) for key in keys}
    shape = BatchShape(len(samples), SEQ_LENGTH, end_of_document=1, is_packed=True)
    with single_process(config) as device, torch.no_grad():
        made = next_batch(iter([batch]), shape, device)
        chunk = load_chunk(config, ours.folder, device)
        losses = chunk(made.tokens, made.position_ids, made.attention_mask, labels=made.labels)
        open_losses = chunk(made.tokens, made.position_ids, None, labels=made.labels)
    assert int(made.loss_mask.sum()) == count
    assert abs(float((losses * made.loss_mask).sum()) / count - total / count) < 1e-4
    # Without the mask between chats the loss is another one, so the comparison can fail.
    assert abs(float((open_losses * made.loss_mask).sum()) / count - total / count) > 1e-2


def words(ours, file, *more):
    """Return the flags of a small run on chats."""
    base = ["--seq-length", str(SEQ_LENGTH), "--micro-batch-size", "2", "--global-batch-size", "2"]
    base += ["--train-iters", "6", "--lr", "1e-2", "--sft", "--data-path", str(file), "--split", "70,30,0"]
    return [*read_flags_script(ours), *base, "--eval-iters", "1", "--num-workers", "0", *more]


def test_training_runs(converted, file):
    """pretrain_gpt.py --sft trains on chats with offload: the loss falls, validation runs."""
    printed = train(converted("llama3").ours, file)
    losses = losses_of(printed)
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert "chats for training: 6" in printed and "lm loss value" in printed


@pytest.mark.full
@pytest.mark.parametrize("layout", [("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")])
def test_layouts_train_alike(converted, file, layout):
    """Tensor- and pipeline-parallel ranks get the same positions and targets: the losses are one process's."""
    ours = converted("llama3").ours
    one, two = losses_of(train(ours, file)), losses_of(train(ours, file, *layout, ranks=2))
    assert two == pytest.approx(one, rel=1e-4)


def train(ours, file, *more, ranks=1):
    """Run pretrain_gpt.py on chats; returns what it printed."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command = [*launch, str(ROOT / "pretrain_gpt.py"), *words(ours, file, *more), "--finetune", "--load", str(ours)]
    command += ["--log-interval", "1", "--interleaved-offload", "--offload-resident-fraction", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def losses_of(printed):
    return [float(word) for word in re.findall(r"lm loss: (\S+)", printed)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no chat"),
        ('{"text": "w1"}', "line 2 is no chat"),
        ('{"messages": [{"role": "user", "content": "w1"}]}', "line 2 has no message of the role assistant"),
        ('{"messages": [{"role": "assistant", "content": [1]}]}', "line 2 has a message whose content is no text"),
    ],
)
def test_bad_lines_are_named(file, line, message):
    """A line that is no chat is refused with file and line, before anything starts."""
    good = file.read_text().splitlines()[0]
    file.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read_chats([str(file)])


def test_lines_end_at_line_feeds_alone(tmp_path):
    """Characters that Python calls line ends may stand in a text as they are; a carriage return before the end may."""
    path = tmp_path / "chats.jsonl"
    content = "a\u2028b\u2029c\x85d"
    line = json.dumps({"messages": [{"role": "assistant", "content": content}]}, ensure_ascii=False)
    path.write_bytes(f"{line}\r\n\r\n{line}\n".encode())
    read = read_chats([str(path)])
    assert [chat.messages[0]["content"] for chat in read] == [content] * 2
    assert [chat.place for chat in read] == [f"{path} line 1", f"{path} line 3"]


def test_settings_that_cannot_work(converted, file, tmp_path):
    """Another tokenizer, a missing template, a missing file and mock data are refused in one sentence."""
    ours = converted("llama3").ours
    config = build_config(words(ours, tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="cannot be read"):
        check_chats(config, (1, 0, 0))
    null = build_config(words(ours, file, "--tokenizer-type", "NullTokenizer", "--vocab-size", "90"))
    with pytest.raises(ValueError, match="HuggingFaceTokenizer"):
        check_chats(null, (1, 0, 0))
    with pytest.raises(ValueError, match="drop --mock-data"):
        build_config(
            [
                *read_flags_script(ours),
                "--sft",
                "--mock-data",
                "--micro-batch-size",
                "1",
                "--train-iters",
                "1",
                "--lr",
                "1",
            ]
        )
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((ours / "tokenizer" / name).read_bytes())
    with pytest.raises(ValueError, match="no chat template"):
        ChatEncoder(str(bare))


def test_template_that_rewrites_history(encoder, monkeypatch):
    """A template that drops words of earlier answers is refused, not trained on wrongly."""
    rewriting = (
        "{% for m in messages %}<s> {{ m['content'] if loop.last else 'w0' }} </s> {% endfor %}"
        "{% if add_generation_prompt %}<s> {% endif %}"
    )
    monkeypatch.setattr(encoder._tokenizer, "chat_template", rewriting)
    messages = [{"role": role, "content": "w5"} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(ValueError, match="writes earlier messages differently"):
        encoder.encode(Chat(tuple(messages), "chats.jsonl line 1"))


@pytest.mark.parametrize("first", ["assistant", "system"])
def test_chat_that_the_template_refuses_is_named(encoder, monkeypatch, first):
    """A template that wants other roles ends training with file, line, roles and its own words."""
    strict = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<s> {{ m['content'] }} </s> {% endfor %}"
    )
    monkeypatch.setattr(encoder._tokenizer, "chat_template", strict)
    messages = [{"role": role, "content": "w5"} for role in (first, "user", "assistant")]
    with pytest.raises(ValueError) as caught:
        encoder.encode(Chat(tuple(messages), "chats.jsonl line 4"))
    said = f"chats.jsonl line 4: the chat template refuses this chat ({first}, user, assistant): roles must alternate"
    assert str(caught.value) == said


@pytest.mark.parametrize("words", ["w5 w6", "a", ""])
def test_first_answer_under_a_template_that_looks_at_it(encoder, monkeypatch, words):
    """Where no empty chat can be rendered, the default words before a first answer are no targets; the answer is."""
    default = (
        "{% if messages[0]['role'] != 'system' %}w1 w2 {% endif %}"
        "{% for m in messages %}<s> {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}<s> {% endif %}"
    )
    monkeypatch.setattr(encoder._tokenizer, "chat_template", default)
    messages = [{"role": role, "content": words} for role in ("assistant", "user", "assistant")]
    encoded = encoder.encode(Chat(tuple(messages), "here"))
    answer = encoder._tokenizer(f"{words} </s>", add_special_tokens=False).input_ids
    assert [token for token, is_target in zip(encoded.tokens, encoded.is_target) if is_target] == answer * 2


def test_splits_are_cut_by_chats(converted, file):
    """--split cuts the conversations; a split without any is left out with a note."""
    config = build_config(words(converted("llama3").ours, file, "--split", "1,0,0"))
    samples, lines, notes = check_chats(config, (12, 4, 4))
    assert samples == (12, 0, 0)
    assert lines == ("chats for training: 9",)
    assert len(notes) == 2
    datasets = build_chat_datasets(config, samples, end_of_document=1)
    assert [dataset is None for dataset in datasets] == [False, True, True]
    assert len(datasets[0]) == 12
