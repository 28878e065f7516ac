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
    """Return the instruction set in use: the one that DEEP_OFFLOAD_ISA names, or the best; ValueError if unsupported."""
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
    """Update fp32 `master`, `exp_avg`, `exp_avg_sq` in place and write `weight` (bf16, fp16, fp32 or None); all [numel].

    Same bits as `reference.adam_update` with FULL storage, whatever `num_threads` (at least 1; OMP_NUM_THREADS has no
    say) and `isa` (a name of `supported_isas`; None: `selected_isa()`). `grad` fp32, bf16 or fp16; a 16-bit `weight`
    may be the very memory of a 16-bit `grad`, any other overlap is refused. `segments` int64 [k, 3], `scalars` fp32
    [num_classes, NUM_SCALARS]. Blocks until done, without the GIL. ValueError that names the argument that is wrong.
    """
    extension().adam_update(
        master, exp_avg, exp_avg_sq, grad, weight, segments, scalars, grad_scale, decoupled, num_threads, isa
    )
