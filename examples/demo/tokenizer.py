"""Train a byte-level BPE tokenizer and save it the way HuggingFace tools expect it.

`python -m examples.demo.tokenizer text.jsonl --vocab-size 8192 --output tokenizer` from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(corpus: Path, vocab_size: int, output: Path) -> int:
    """Train on the "text" fields of the JSON lines in `corpus`, write the folder `output`, return the tokens it has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # All 256 bytes, so that any text can be written with this vocabulary.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(corpus), trainer)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    return tokenizer.get_vocab_size()


def _texts(corpus: Path) -> Iterator[str]:
    with corpus.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)["text"]


def main() -> int:
    """Train on the file that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo.tokenizer", description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="JSON lines with the text under `text`")
    parser.add_argument("--vocab-size", type=int, default=8192, help="tokens at most (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder to write tokenizer.json into")
    options = parser.parse_args()
    try:
        num_tokens = train_tokenizer(options.corpus, options.vocab_size, options.output)
    except (OSError, ValueError, KeyError) as error:
        print(f"{parser.prog}: error: {options.corpus} cannot be used: {error}", file=sys.stderr)
        return 1
    print(f"trained a byte-level BPE tokenizer with {num_tokens} tokens in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
