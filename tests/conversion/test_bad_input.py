"""Input that cannot be converted: one sentence, exit code 2, and nothing that looks like a checkpoint."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.training.checkpointing_safety import load_index
from megatron.training.conversion import cli
from megatron.training.conversion.safetensors_file import Entry, split_into_files, write_file
from tests.conversion import tiny_models

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(converted, tmp_path):
    """Return a copy of a model's folder that a test may damage."""
    return shutil.copytree(converted("llama2").hf, tmp_path / "hf")


def refuse(capsys, folder, tmp_path, *words):
    """Import must fail with one sentence that holds `words`, and leave nothing."""
    before = sorted(tmp_path.iterdir())
    assert cli.main(["import", "--hf", str(folder), "--save", str(tmp_path / "ours")]) == cli.EXIT_USAGE
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("convert.py: error: ")
    for word in words:
        assert word in message
    assert sorted(tmp_path.iterdir()) == before
    return message


def change_config(folder, **changes):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))


def change_tensor(folder, name, change):
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = change(tensors[name])
            save_file({key: value for key, value in tensors.items() if value is not None}, path)
            return
    raise AssertionError(name)


Q = "model.layers.1.self_attn.q_proj.weight"


def test_missing_shard(capsys, folder, tmp_path):
    """A file that the index names is not there."""
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    refuse(capsys, folder, tmp_path, gone.name, "which its index names")


def test_index_names_absent_tensor(capsys, folder, tmp_path):
    """The index places a tensor in a file that has it not."""
    change_tensor(folder, Q, lambda tensor: None)
    refuse(capsys, folder, tmp_path, Q, "where it is not")


def test_tensor_nowhere(capsys, folder, tmp_path):
    """A layer that config.json asks for is in no file."""
    change_config(folder, num_hidden_layers=5)
    refuse(capsys, folder, tmp_path, "model.layers.4.", "more tensors", "config.json asks for")


def test_unknown_tensor(capsys, folder, tmp_path):
    """A tensor that nobody would read is not dropped silently."""
    change_config(folder, num_hidden_layers=3)
    refuse(capsys, folder, tmp_path, "model.layers.3.", "which a LlamaForCausalLM has not")


def test_truncated_file(capsys, folder, tmp_path):
    """A file that was cut short."""
    path = sorted(folder.glob("model-*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-100])
    refuse(capsys, folder, tmp_path, path.name, "cut short")


def test_nan(capsys, folder, tmp_path):
    """NaN in a tensor, found while the checkpoint is being written."""

    def spoil(tensor):
        tensor[3, 3] = float("nan")
        return tensor

    change_tensor(folder, "model.layers.3.mlp.down_proj.weight", spoil)
    refuse(capsys, folder, tmp_path, "model.layers.3.mlp.down_proj.weight", "1 values that are NaN or infinite")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_wrong_dtype(capsys, folder, tmp_path, dtype):
    """Quantized and double tensors."""
    change_tensor(folder, Q, lambda tensor: tensor.to(dtype))
    refuse(capsys, folder, tmp_path, Q, "no float32, bfloat16 or float16")


def test_mixed_dtypes(capsys, folder, tmp_path):
    """Two types in one model."""
    change_tensor(folder, Q, lambda tensor: tensor.to(torch.bfloat16))
    refuse(capsys, folder, tmp_path, Q, "mixes types", "bfloat16", "float32")


def test_wrong_shape(capsys, folder, tmp_path):
    """Weights that are not the ones of the config."""
    change_config(folder, intermediate_size=80)
    refuse(capsys, folder, tmp_path, "has the shape (96, 64)", "(80, 64)")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MixtralForCausalLM", ["which needs experts", "LlamaForCausalLM"]),
        ("FalconForCausalLM", ["a single norm"]),
        ("HomeMadeForCausalLM", ["HomeMadeForCausalLM", "it is not built here", "GPTNeoXForCausalLM"]),
    ],
)
def test_unknown_architecture(capsys, folder, tmp_path, name, words):
    """An architecture that is not built is refused by name, with what is missing."""
    change_config(folder, architectures=[name])
    refuse(capsys, folder, tmp_path, *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "'silu'"]),
        ({"attention_bias": True}, ["attention_bias True"]),
        ({"mlp_bias": True}, ["mlp_bias True"]),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "llama3"]),
        ({"rope_parameters": {"rope_theta": 10000.5, "rope_type": "default"}}, ["10000.5", "whole number"]),
        ({"architectures": []}, ["names 0 architectures"]),
    ],
)
def test_settings_that_are_not_built(capsys, folder, tmp_path, changes, words):
    """A setting of a known architecture that would compute something else is refused, not ignored."""
    change_config(folder, **changes)
    refuse(capsys, folder, tmp_path, *words)


def test_windows_on_some_layers(capsys, converted, tmp_path):
    """Layers that differ in their window are refused."""
    folder = shutil.copytree(converted("qwen2").hf, tmp_path / "hf")
    kinds = ["full_attention", "sliding_attention"] * 2
    change_config(folder, use_sliding_window=True, sliding_window=20, layer_types=kinds, max_window_layers=2)
    refuse(capsys, folder, tmp_path, "window on some layers only")


def test_no_tokenizer(capsys, folder, tmp_path):
    """A folder without a tokenizer."""
    (folder / "tokenizer.json").unlink()
    refuse(capsys, folder, tmp_path, "has no tokenizer")


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_no_config(capsys, folder, tmp_path, text):
    """A config.json that is missing or no JSON object."""
    if text is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(text)
    refuse(capsys, folder, tmp_path, "config.json")


def test_no_weights(capsys, folder, tmp_path):
    """A folder with everything but weights."""
    for path in folder.glob("model*"):
        path.unlink()
    refuse(capsys, folder, tmp_path, "no model.safetensors, no pytorch_model.bin")


def test_index_that_leads_out(capsys, folder, tmp_path):
    """An index that names a file elsewhere."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][Q] = "../other.safetensors"
    path.write_text(json.dumps(index))
    refuse(capsys, folder, tmp_path, "../other.safetensors")


class Harmful:
    """Makes a file when it is unpickled without restriction."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_pickle_that_runs_code(capsys, folder, tmp_path):
    """A .bin file that would run something is not run."""
    for path in folder.glob("model*"):
        path.unlink()
    marker = tmp_path / "ran"
    torch.save({"a": torch.zeros(1), "b": Harmful(marker)}, folder / "pytorch_model.bin")
    refuse(capsys, folder, tmp_path, "pytorch_model.bin", "not safe")
    assert not marker.exists()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps([1, 2])[:-1])
    refuse(capsys, folder, tmp_path, "pytorch_model.bin")


def test_target_is_not_overwritten(capsys, folder, tmp_path):
    """A folder that holds something is left alone, by import and by export."""
    target = tmp_path / "ours"
    target.mkdir()
    (target / "precious").write_text("data")
    assert cli.main(["import", "--hf", str(folder), "--save", str(target)]) == cli.EXIT_USAGE
    assert "is not an empty folder" in capsys.readouterr().err
    assert cli.main(["import", "--hf", str(folder), "--save", str(tmp_path / "no" / "ours")]) == cli.EXIT_USAGE
    assert "does not exist" in capsys.readouterr().err
    assert [path.name for path in target.iterdir()] == ["precious"]


def test_damaged_checkpoint(capsys, converted, tmp_path):
    """Export of a checkpoint that lacks a part, or is none, writes nothing."""
    ours = shutil.copytree(converted("llama2").ours, tmp_path / "ours")
    words = ["export", "--load", str(ours), "--hf-out", str(tmp_path / "out")]
    (ours / "release" / "common.pt").rename(tmp_path / "common.pt")
    assert cli.main(words) == cli.EXIT_USAGE
    assert "lacks common.pt" in capsys.readouterr().err
    (tmp_path / "common.pt").rename(ours / "release" / "common.pt")
    data = ours / "release" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    assert cli.main(words) == cli.EXIT_USAGE
    assert "is damaged" in capsys.readouterr().err
    (ours / "latest_checkpointed_iteration.txt").unlink()
    assert cli.main(words) == cli.EXIT_USAGE
    assert "holds no checkpoint" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


def export_is_refused(capsys, ours, out):
    """Export must fail with one sentence and leave nothing; returns the sentence."""
    assert cli.main(["export", "--load", str(ours), "--hf-out", str(out)]) == cli.EXIT_USAGE
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("convert.py: error: ")
    assert all(line.startswith("exporting: ") for line in lines[:-1])
    assert not out.exists()
    return lines[-1]


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata"])
def test_flipped_bit(capsys, converted, tmp_path, name):
    """One bit that turned on the disk is found by the checksums, wherever it is."""
    ours = shutil.copytree(converted("llama2").ours, tmp_path / "ours")
    path = ours / "release" / name
    data = bytearray(path.read_bytes())
    if name == "__0_0.distcp":
        norm = load_file(sorted(converted("llama2").hf.glob("model-*"))[-1])["model.norm.weight"]
        at = data.index(norm.numpy().tobytes())
    else:
        at = data.index(b"norm_epsilon" if name == "common.pt" else b"final_layernorm")
    data[at] ^= 1
    path.write_bytes(data)
    message = export_is_refused(capsys, ours, tmp_path / "out")
    assert f"{name} is damaged, its SHA-256 is" in message


def test_checksums_that_miss_a_file(capsys, converted, tmp_path):
    """Checksums that were cut short are no proof."""
    ours = shutil.copytree(converted("llama2").ours, tmp_path / "ours")
    sums = ours / "release" / "SHA256SUMS"
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if "distcp" not in line))
    assert "SHA256SUMS has no line for __0_0.distcp" in export_is_refused(capsys, ours, tmp_path / "out")


@pytest.mark.parametrize("change", ["hole", "overlap"])
def test_index_that_does_not_fill_a_tensor(capsys, converted, tmp_path, change):
    """Elements that no file holds are not exported as whatever memory held, also without checksums."""
    ours = shutil.copytree(converted("llama2").ours, tmp_path / "ours")
    release = ours / "release"
    (release / "SHA256SUMS").unlink()
    index = load_index(release / ".metadata")
    chunks = index.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks
    if change == "hole":
        del chunks[2]
    else:
        chunks.append(chunks[2])
    (release / ".metadata").write_bytes(pickle.dumps(index))
    count = 0 if change == "hole" else 2 * 64 * 96
    expected = f"names {count} of 6144 elements of decoder.layers.mlp.linear_fc2.weight of layer 2"
    assert expected in export_is_refused(capsys, ours, tmp_path / "out")


def test_checkpoint_without_checksums(converted, tmp_path):
    """Checkpoints of other programs have no checksums, and are exported."""
    ours = shutil.copytree(converted("llama2").ours, tmp_path / "ours")
    (ours / "release" / "SHA256SUMS").unlink()
    assert cli.main(["export", "--load", str(ours), "--hf-out", str(tmp_path / "out")]) == cli.EXIT_GOOD


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_import_leaves_no_checkpoint(folder, tmp_path, number):
    """An import that is killed while it writes leaves no SAVE folder, and the next one succeeds."""
    slow = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from megatron.training.conversion import cli, dist_checkpoint\n"
        "from megatron.training.checkpointing_format import BoxWriter\n"
        "add = BoxWriter.add_tensor\n"
        "def slowly(self, *args):\n"
        "    add(self, *args); print('wrote', flush=True); time.sleep(0.5)\n"
        "BoxWriter.add_tensor = slowly\n"
        "cli.main(['import', '--hf', sys.argv[2], '--save', sys.argv[3]])\n"
    )
    save = tmp_path / "ours"
    command = [sys.executable, "-c", slow, str(ROOT), str(folder), str(save)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout.readline().strip() == "wrote"
    time.sleep(0.1)
    os.kill(process.pid, number)
    process.wait(timeout=20)
    process.stdout.close()
    assert not save.exists()
    assert cli.main(["import", "--hf", str(folder), "--save", str(save)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]


def test_memory_is_one_tensor(tmp_path):
    """Import and export of a model hold far less memory than its weights: they stream."""
    code = (
        "import resource, sys; sys.path.insert(0, sys.argv[1])\n"
        "from megatron.training.conversion import cli, importer, exporter\n"
        "import transformers; transformers.AutoConfig.for_model('llama')\n"
        "import threading, time\n"
        "def anonymous():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('RssAnon')) << 10\n"
        "peak, done = [0], []\n"
        "def watch():\n"
        "    while not done: peak[0] = max(peak[0], anonymous()); time.sleep(0.002)\n"
        "start = anonymous(); thread = threading.Thread(target=watch); thread.start()\n"
        "assert cli.main(['import', '--hf', sys.argv[2], '--save', sys.argv[3]]) == 0\n"
        "assert cli.main(['export', '--load', sys.argv[3], '--hf-out', sys.argv[4]]) == 0\n"
        "done.append(1); thread.join(); print(peak[0] - start)\n"
    )
    model = tiny_models.build(
        "llama2", hidden_size=512, intermediate_size=2048, num_hidden_layers=20, num_attention_heads=8
    )
    hf = tiny_models.save(model, tmp_path / "hf", torch.float32, shard="200MB")
    weights = sum(path.stat().st_size for path in hf.glob("*.safetensors"))
    command = [sys.executable, "-c", code, str(ROOT), str(hf), str(tmp_path / "ours"), str(tmp_path / "out")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    assert weights > 250 << 20
    assert int(printed.split()[-1]) < weights / 4


def test_files_are_cut_by_size():
    """Shards are as large as allowed and never empty."""
    entries = [Entry(str(i), (size,), torch.float32) for i, size in enumerate((10, 10, 30, 1, 1))]
    sizes = [[entry.name for entry in part] for part in split_into_files(entries, 80)]
    assert sizes == [["0", "1"], ["2"], ["3", "4"]]


def test_safetensors_are_the_librarys(tmp_path):
    """What is written here is what the safetensors library reads."""
    tensors = {"b": torch.randn(3, 5).bfloat16(), "a": torch.arange(4.0), "c": torch.randn(2, 0, 3).half()}
    entries = [Entry(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    write_file(tmp_path / "x.safetensors", entries, tensors.__getitem__)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
