"""The Adam update on the CPU: a thin call into the compiled module `deep_offload._C`, which checks every argument."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

_BUILD_HINT = "build it with `pip install -e .` or `python setup.py build_ext --inplace` in the repository's root"


class ExtensionMissingError(ImportError):
    """The compiled module `deep_offload._C` is not there or cannot be loaded."""


def extension() -> ModuleType:
    """Return the compiled module; ExtensionMissingError with the way to build it where it does not import."""
    try:
        from deep_offload import _C  # optional at import time: the pure parts of the project work without it
    except ImportError as error:
        raise ExtensionMissingError(
            f"the compiled module deep_offload._C cannot be imported ({error}); {_BUILD_HINT}"
        ) from error
    return _C


def supported_isas() -> tuple[str, ...]:
    """Return the names of the instruction sets that this machine and this build run, best first."""
    return tuple(extension().supported_isas())


def selected_isa() -> str:
    """Return the instruction set in use: DEEP_OFFLOAD_ISA's, or the best; ValueError if that one is not supported."""
    return str(extension().selected_isa())


def adam_update(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    segments: Tensor,
    scalars: Tensor,
    grad_scale: float,
    decoupled: bool,
    num_threads: int,
    isa: str | None = None,
) -> None:
    """Update fp32 `master`, `exp_avg`, `exp_avg_sq` in place, write `weight` (bf16, fp16, fp32 or None); [numel] each.

    Same bits as `reference.adam_update` with FULL storage, whatever `num_threads` (at least 1; OMP_NUM_THREADS has no
    say) and `isa` (a name of `supported_isas`; None: `selected_isa()`). `grad` fp32, bf16 or fp16; a 16-bit `weight`
    may be the very memory of a 16-bit `grad`, any other overlap is refused. `segments` int64 [k, 3], `scalars` fp32
    [num_classes, NUM_SCALARS]. Blocks until done, without the GIL. ValueError that names the argument that is wrong.
    """
    extension().adam_update(
        master, exp_avg, exp_avg_sq, grad, weight, segments, scalars, grad_scale, decoupled, num_threads, isa
    )


def first_touch(memory: Tensor, num_threads: int) -> None:
    """Zero `memory` (contiguous, any dtype, on the CPU), its pages divided between threads as in an update."""
    if memory.device.type != "cpu" or not memory.is_contiguous():
        raise ValueError(f"memory: expected a contiguous CPU tensor, got one on {memory.device} of {memory.stride()}")
    extension().first_touch(memory.data_ptr(), memory.nbytes, num_threads)


def adam_pattern_seconds(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    num_threads: int,
    isa: str | None = None,
) -> float:
    """Return the seconds of `adam_update`'s reads and writes without its arithmetic; destroys what the arrays hold."""
    return float(extension().adam_pattern(master, exp_avg, exp_avg_sq, grad, weight, num_threads, isa))


def triad_seconds(a: Tensor, b: Tensor, c: Tensor, num_threads: int) -> float:
    """Return the seconds of a = b + 3 * c (fp32 [numel], streaming stores): 12 bytes of memory traffic an element."""
    return float(extension().stream_triad(a, b, c, num_threads))
