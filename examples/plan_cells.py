"""Plans for the example scripts: every model on 1, 2, 4 and 8 GPUs of 40, 80 and 141 GB, from the planner.

`python examples/plan_cells.py` says whether the scripts and docs/memory_sizing.md are current (exit code 1 if not);
`--write` writes them anew. Standard library only; nothing is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deep_offload.config import OffloadConfig  # noqa: E402 - the repository first, installed or not
from deep_offload.model.dry_run import GPU_MEMORY_SHARE, Forecast, forecast  # noqa: E402
from deep_offload.model.gpt import GPTShape, ParallelShape, padded_to  # noqa: E402
from deep_offload.model.hardware import HardwareProfile  # noqa: E402
from deep_offload.model.machines import BUILT_IN_PROFILES  # noqa: E402
from deep_offload.model.planning import first_fitting, free_gpu_bytes  # noqa: E402
from deep_offload.model.run import RunShape, model_bytes  # noqa: E402

GIB = 1 << 30
GPU_COUNTS = (1, 2, 4, 8)
MICRO_BATCHES = 64
"""Global batch of the examples on one node, in samples of micro-batches of 1."""

GPUS = {40: (39, "a100x4"), 80: (79, "h100x8"), 141: (139, "h200x2")}
"""GB as sold: (GiB that the driver shows, profile whose rates are taken)."""

DOCUMENT = ROOT / "docs" / "memory_sizing.md"


@dataclass(frozen=True, slots=True)
class Example:
    """One model script."""

    script: str
    title: str
    shape: GPTShape
    seq_length: int


def _llama(layers: int, hidden: int, heads: int, ffn: int, groups: int, vocab: int) -> GPTShape:
    return GPTShape(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=hidden // heads,
        padded_vocab_size=vocab,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        tie_embeddings=False,
    )


EXAMPLES = (
    Example("llama2_7b.sh", "7B (Llama-2 shape)", _llama(32, 4096, 32, 11008, 32, 32000), 4096),
    Example("llama3_8b.sh", "8B (Llama-3 shape)", _llama(32, 4096, 32, 14336, 8, 128256), 8192),
    Example("llama2_13b.sh", "13B (Llama-2 shape)", _llama(40, 5120, 40, 13824, 40, 32000), 4096),
    Example(
        "gpt_20b.sh",
        "20B (GPT-NeoX widths)",
        replace(_llama(44, 6144, 64, 24576, 64, 50432), swiglu=False, normalization="LayerNorm", add_bias_linear=True),
        2048,
    ),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A model on one machine. result None: impossible, `reason` says why. budget_gib None: no offload needed."""

    example: Example
    num_gpus: int
    gpu_gb: int
    result: Forecast | None
    budget_gib: int | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.num_gpus} x {self.gpu_gb} GB"

    @property
    def run(self) -> RunShape:
        assert self.result is not None
        return self.result.run


def machine(num_gpus: int, gpu_gb: int) -> HardwareProfile:
    """One node with these GPUs and as much host memory as it takes."""
    gib, name = GPUS[gpu_gb]
    return replace(BUILT_IN_PROFILES[name], num_gpus=num_gpus, host_memory_bytes=0, gpu_memory_bytes=gib * GIB)


def plan_cell(example: Example, num_gpus: int, gpu_gb: int) -> Cell:
    """The least recomputation and tensor parallelism that fits; fp32 gradients where they cost neither nor offload."""
    profile = machine(num_gpus, gpu_gb)
    cells = []
    for grad_bytes in (2, 4):
        run = _fit(example, num_gpus, profile, grad_bytes)
        if run is not None:
            cells.append(_place(example, num_gpus, gpu_gb, run, profile))
    if not cells:
        return Cell(example, num_gpus, gpu_gb, None, reason=_why_impossible(example, num_gpus, profile))
    best = cells[0]
    for cell in cells[1:]:
        same = cell.run.recompute == best.run.recompute and cell.run.parallel == best.run.parallel
        if same and cell.budget_gib is None and best.budget_gib is None:
            best = cell
    return best


def _fit(example: Example, num_gpus: int, profile: HardwareProfile, grad_bytes: int) -> RunShape | None:
    base = RunShape(
        model=example.shape,
        parallel=ParallelShape(data=num_gpus, sequence_parallel=True),
        seq_length=example.seq_length,
        micro_batch_size=1,
        global_batch_size=MICRO_BATCHES,
        grad_bytes=grad_bytes,
        overlap_grad_reduce=True,
    )
    run = first_fitting(base, num_gpus, OffloadConfig(interleaved_offload=True), profile)
    if run is None or run.parallel.pipeline > 1:
        return None
    parallel = replace(run.parallel, sequence_parallel=run.parallel.tensor > 1)
    model = padded_to(example.shape, parallel.tensor)
    return replace(run, parallel=parallel, model=model, global_batch_size=MICRO_BATCHES)


def _place(example: Example, num_gpus: int, gpu_gb: int, run: RunShape, profile: HardwareProfile) -> Cell:
    without = forecast(run, OffloadConfig(offload_resident_fraction=1.0), profile)
    if not without.problems:
        return Cell(example, num_gpus, gpu_gb, without)
    budget = max(1, free_gpu_bytes(run, profile) // GIB - 1)
    config = OffloadConfig(interleaved_offload=True, offload_device_budget_gib=float(budget))
    return Cell(example, num_gpus, gpu_gb, forecast(run, config, profile), budget)


def _why_impossible(example: Example, num_gpus: int, profile: HardwareProfile) -> str:
    """Weights and gradients alone, or the whole of the smallest layout."""
    tensor = max(t for t in (1, 2, 4, 8) if t <= num_gpus and example.shape.num_query_groups % t == 0)
    parallel = ParallelShape(tensor=tensor, data=num_gpus // tensor, sequence_parallel=tensor > 1)
    run = RunShape(
        model=padded_to(example.shape, tensor),
        parallel=parallel,
        seq_length=example.seq_length,
        micro_batch_size=1,
        global_batch_size=MICRO_BATCHES,
        grad_bytes=2,
        overlap_grad_reduce=True,
    )
    need = model_bytes(run)
    usable = GPU_MEMORY_SHARE * profile.gpu_memory_bytes
    text = f"bf16 weights {gib(need.weights)} and gradients {gib(need.gradients)} GiB"
    text += f" of each GPU at tensor parallel {tensor}" if tensor > 1 else ""
    if need.weights + need.gradients <= usable:
        text += f", logits {gib(need.head)} GiB and activations"
    text += f" exceed the usable {gib(usable)} GiB before any optimizer state"
    shorter = replace(example, seq_length=example.seq_length // 4)
    if _fit(shorter, num_gpus, profile, 2) is not None:
        text += f"; SEQ_LENGTH={shorter.seq_length} would fit, with a plan of one's own"
    return text


def gib(num_bytes: float) -> str:
    """GiB with one digit."""
    return f"{num_bytes / GIB:.1f}"


def script_case(cell: Cell) -> list[str]:
    """The lines of a cell in its model script."""
    head = f'"{cell.name}")'
    if cell.result is None:
        return [head, f'    IMPOSSIBLE="{cell.reason}"', "    ;;"]
    run, stage = cell.run, cell.result.stages[0]
    model, choice = stage.model, stage.choice
    usable = GPU_MEMORY_SHARE * cell.result.profile.gpu_memory_bytes
    grads = "bf16" if run.grad_bytes == 2 else "fp32"
    lines = [
        head,
        f"    # GPU: {gib(stage.gpu_bytes)} of {gib(usable)} usable GiB = weights {gib(model.weights)}, gradients "
        f"{gib(model.gradients)} ({grads}), activations",
        f"    # {gib(model.activations)}, logits or a layer's largest tensors {gib(model.largest)}, optimizer state "
        f"{gib(choice.device_bytes.resident)}, slots and upcast "
        f"{gib(choice.device_bytes.slots + choice.device_bytes.upcast)}.",
    ]
    if run.recompute.granularity == "full":
        saved = model_bytes(replace(run, recompute=type(run.recompute)())).activations
        lines.append(f"    # Full recomputation: activations would take {gib(saved)} GiB otherwise.")
    if run.grad_bytes == 2:
        lines.append(f"    # bf16 gradients: fp32 ones would take {gib(2 * model.gradients)} GiB.")
    if cell.budget_gib is None:
        lines.append("    # All state fits beside them: offload is not needed and would gain nothing.")
        budget = "none"
    else:
        host, resident = gib(stage.host_bytes * cell.num_gpus), f"{100 * choice.resident_fraction:.0f} %"
        lines += [
            f"    # Host: {host} GiB of the node, pinned: {resident} of the state stay on the GPU; of the rest the",
            f"    # planner expects the GPU to update {100 * choice.gpu_share:.0f} % (bound by {choice.binding_lane}).",
        ]
        budget = str(cell.budget_gib)
    recompute = run.recompute.granularity or "none"
    lines.append(f"    TENSOR={run.parallel.tensor} RECOMPUTE={recompute} GRADIENTS={grads} BUDGET_GIB={budget}")
    return [*lines, "    ;;"]


def script_block(cells: Sequence[Cell]) -> str:
    """The case statement of a model script."""
    lines = ['case "$GPUS x $GPU_GB GB" in']
    for cell in cells:
        lines += script_case(cell)
    lines += [
        "*)",
        '    IMPOSSIBLE="there is no plan for it; GPUS is 1, 2, 4 or 8 (of one node) and GPU_GB is 40, 80 or 141"',
        "    ;;",
        "esac",
    ]
    return "\n".join(lines) + "\n"


def table(cells: Sequence[Cell]) -> str:
    """The rows of one model in docs/memory_sizing.md."""
    lines = [
        "| GPUs | tensor x data | recompute | gradients | GPU GiB of usable | host GiB of the node | state on the GPU "
        "| update | iteration |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        if cell.result is None:
            lines.append(f"| {cell.name} | impossible: {cell.reason} | | | | | | | |")
            continue
        run, stage = cell.run, cell.result.stages[0]
        usable = GPU_MEMORY_SHARE * cell.result.profile.gpu_memory_bytes
        where = "all, no offload" if cell.budget_gib is None else f"{100 * stage.choice.resident_fraction:.0f} %"
        lines.append(
            f"| {cell.name} | {run.parallel.tensor} x {run.parallel.data} | {run.recompute.granularity or 'none'} | "
            f"{'bf16' if run.grad_bytes == 2 else 'fp32'} | {gib(stage.gpu_bytes)} of {gib(usable)} | "
            f"{gib(stage.host_bytes * cell.num_gpus)} | {where} | "
            f"{1e3 * stage.choice.predicted_update_seconds:.0f} ms | {cell.result.iteration_seconds:.1f} s |"
        )
    return "\n".join(lines) + "\n"


def replaced(text: str, name: str, block: str, comment: str) -> str:
    """`text` with the part between the marks `begin NAME` and `end NAME` replaced."""
    begin, end = (comment.format(f"{word} {name} (written by examples/plan_cells.py)") for word in ("begin", "end"))
    head, found, rest = text.partition(begin + "\n")
    assert found and end in rest, f"the marks of {name} are missing"
    return head + begin + "\n" + block + rest[rest.index(end) :]


def files() -> dict[Path, str]:
    """Every file that holds a plan, as it should be."""
    document = DOCUMENT.read_text(encoding="utf-8")
    result = {}
    for example in EXAMPLES:
        cells = [plan_cell(example, count, gb) for gb in GPUS for count in GPU_COUNTS]
        path = ROOT / "examples" / example.script
        result[path] = replaced(path.read_text(encoding="utf-8"), "plans", script_block(cells), "# {}")
        document = replaced(document, example.script, table(cells), "<!-- {} -->")
    result[DOCUMENT] = document
    return result


def main(argv: Sequence[str]) -> int:
    """Check or write; returns the exit code."""
    parser = argparse.ArgumentParser(description="plans of the example scripts and docs/memory_sizing.md")
    parser.add_argument("--write", action="store_true", help="write them anew")
    arguments = parser.parse_args(argv)
    stale = {path: text for path, text in files().items() if path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        if arguments.write:
            path.write_text(text, encoding="utf-8")
        print(f"{'wrote' if arguments.write else 'out of date:'} {path.relative_to(ROOT)}")
    return 0 if arguments.write or not stale else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
