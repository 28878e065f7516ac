"""Reading a HuggingFace folder one tensor at a time: safetensors, or pickles that hold nothing but tensors."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_SAFETENSORS, _PICKLE = "model.safetensors", "pytorch_model.bin"
_NAMES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and what it is, known without reading it. dtype: None for types that hold no weights."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None


class Source:
    """The tensors of one folder, by name. Files are opened for each read, so that no pages stay mapped."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of all files. Raises ValueError, one sentence, for files that are missing or damaged."""
        self.folder = folder
        files, named = _files(folder)
        self.tensors: dict[str, TensorInfo] = {}
        self._loaded: tuple[Path, dict[str, torch.Tensor]] | None = None
        for file in files:
            for name, info in self._header(file).items():
                if name in self.tensors:
                    raise ValueError(
                        f"{folder} has the tensor {name} in {self.tensors[name].file.name} and {file.name}"
                    )
                self.tensors[name] = info
        absent = [name for name, file in named.items() if self._place(name) != file]
        if absent:
            name = absent[0]
            more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
            raise ValueError(
                f"the index of {folder} says that {name}{more} is in {named[name]}, where it is not: fetch them again"
            )

    def _place(self, name: str) -> str | None:
        return self.tensors[name].file.name if name in self.tensors else None

    @property
    def largest_file_bytes(self) -> int:
        """Size of the largest file."""
        return max(info.file.stat().st_size for info in self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor. Raises ValueError for damaged bytes and for NaN or infinity in it."""
        info = self.tensors[name]
        if info.file.suffix == ".bin":
            tensor = self._unpickled(info.file)[name]
        else:
            with _opened(info.file) as file:
                tensor = file.get_tensor(name).clone()  # what the file maps must not outlive it
        if not _is_finite(tensor):
            count = int((~torch.isfinite(tensor)).sum())
            raise ValueError(
                f"the tensor {name} in {info.file} has {count} values that are NaN or infinite: it is damaged, fetch "
                "it again"
            )
        return tensor

    def _header(self, file: Path) -> dict[str, TensorInfo]:
        if file.suffix == ".bin":
            tensors = self._unpickled(file)
            return {name: TensorInfo(file, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        header = {}
        with _opened(file) as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                header[name] = TensorInfo(file, tuple(part.get_shape()), _NAMES.get(part.get_dtype()))
        return header

    def _unpickled(self, file: Path) -> dict[str, torch.Tensor]:
        if self._loaded is None or self._loaded[0] != file:
            self._loaded = None  # at most one pickle in memory
            self._loaded = (file, _load_pickle(file))
        return self._loaded[1]


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite; both show in the extremes, which cost far less than torch.isfinite."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor))


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files to read, and the file name that an index gives for each tensor (empty without an index)."""
    for name in (_SAFETENSORS, _PICKLE):
        index = folder / f"{name}.index.json"
        if index.is_file():
            named = _read_index(index)
            files = [folder / file for file in sorted(set(named.values()))]
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise ValueError(f"{folder} lacks {_list(missing)}, which its index names: fetch the missing files")
            return files, named
        if (folder / name).is_file():
            return [folder / name], {}
    raise ValueError(f"{folder} has no {_SAFETENSORS}, no {_PICKLE} and no index of either: give a model's folder")


def _list(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _read_index(path: Path) -> dict[str, str]:
    try:
        named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        plain = {str(name): str(file) for name, file in named.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is no index of a checkpoint (JSON with a weight_map): fetch it again") from None
    outside = [file for file in plain.values() if Path(file).name != file]
    if outside or not plain:
        raise ValueError(
            f"{path} names {outside[0] if outside else 'no files'}: an index names files of its own folder"
        )
    return plain


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} is cut short or no safetensors file ({reason}): fetch it again") from None


def _load_pickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format of before torch 1.6 cannot be mapped
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{file} holds more than tensors, and running what else it holds is not safe: convert it to safetensors"
        ) from None
    except Exception as error:  # noqa: BLE001 - a damaged archive raises anything
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"{file} is cut short or no file of torch.save ({reason}): fetch it again") from None
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise ValueError(f"{file} holds more than named tensors: it is not a model's checkpoint")
    return loaded
