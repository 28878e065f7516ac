"""Checkpoints that stay in the repository, so that every later version has to read them.

`python -m tests.checkpoint.stored FOLDER`, run in the repository's root with a relative folder, writes one with the
code as it is, and `expected.json` beside it. Do so when `checkpointing_save.OUR_FORMAT` rises, into a folder of that
number, and keep the old ones.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from tests.checkpoint.cases import MODEL, OFFLOAD, train, words
from tests.rank_pool import RankPool

FOLDERS = sorted((Path(__file__).parent / "data").glob("format*"))

SMALL = (
    f"{MODEL} --num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 2 --num-query-groups 2 "
    "--hidden-dropout 0.1 --vocab-size 47 --make-vocab-size-divisible-by 2 --fp16 --initial-loss-scale 1024 "
    "--disable-bias-linear"
).replace("--bf16 ", "")


def main(folder: str) -> None:
    """Train three steps on two tensor-parallel ranks and write what must come out of the file again."""
    flags = "--tensor-model-parallel-size 2 --offload-subgroup-numel 100000 --exit-interval 3 --save-interval 3"
    with RankPool(2) as pool:
        result = pool.run(train, words(SMALL, OFFLOAD, flags, f"--save {folder}"))[0]
    expected = {name: result[name] for name in ("digest", "iteration", "samples", "step")}
    expected["written by"] = {name: version(name) for name in ("torch", "megatron-core")}
    (Path(folder) / "status").unlink()
    (Path(folder) / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
