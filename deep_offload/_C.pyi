"""Types of the compiled module; csrc/bindings.cpp defines it and checks every argument."""

from torch import Tensor

def supported_isas() -> list[str]: ...
def selected_isa() -> str: ...
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
) -> None: ...
def adam_roads(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    scalars: Tensor,
    grad_scale: float,
    isa: str,
) -> list[int]: ...
def adam_pattern(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    num_threads: int,
    isa: str | None = None,
) -> float: ...
def stream_triad(a: Tensor, b: Tensor, c: Tensor, num_threads: int) -> float: ...
def first_touch(address: int, num_bytes: int, num_threads: int) -> None: ...
