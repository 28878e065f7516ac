"""The last stage of fine_tune.py: transformers opens a folder and computes a run's last validation loss.

    python -m benchmarks.fine_tune_reload FOLDER FLAGS_OF_THE_RUN...

Nothing of the training code computes the loss: only its data loader is used, for the same samples. Prints one line of
JSON: loss, tokens, and the peak of GPU memory in GiB (null without a GPU).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from megatron.training.arguments import build_config
from megatron.training.conversion.parity import single_process
from megatron.training.data import TrainingData, check_data, tokenizer_of


def last_validation_batches(words: list[str]) -> list[dict[str, torch.Tensor]]:
    """Return the batches that the evaluation at the end of a run of these flags reads, after the one at its start."""
    config = build_config([*words, "--use-cpu"])
    tokenizer = tokenizer_of(config.data)
    config = config.with_vocab(tokenizer.vocab_size)
    per_evaluation = config.logging.eval_iters * config.batch.global_batch_size
    with single_process(config):
        data = TrainingData(config, check_data(config), tokenizer, [(True, True)])
        iterator = data.valid_iterators(per_evaluation)[0]
        assert iterator is not None
        return [next(iterator) for _ in range(per_evaluation // config.batch.micro_batch_size)]


def mean_loss(folder: Path, batches: list[dict[str, torch.Tensor]], device: torch.device) -> tuple[float, int]:
    """Return the mean loss of a folder's model, in bf16, and the number of tokens that it counts."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    with torch.no_grad():
        for batch in batches:
            logits = model(batch["tokens"].to(device)).logits.float().flatten(0, 1)
            losses = torch.nn.functional.cross_entropy(logits, batch["labels"].to(device).flatten(), reduction="none")
            mask = batch["loss_mask"].to(device).flatten()
            total += (losses * mask).sum()
            count += int(mask.sum())
    return float(total) / count, count


def main() -> None:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    batches = last_validation_batches(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loss, count = mean_loss(folder, batches, device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    print(json.dumps({"loss": loss, "tokens": count, "peak_gpu": peak}))


if __name__ == "__main__":
    main()
