"""What a checkpoint may hold: every pickle passes an allow-list before anything opens it, every file its checksum."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import torch
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint.metadata import Metadata

from megatron.training.checkpointing_layout import CHECKSUMS

# torch's own list for weights_only; other parts of megatron-core add to it as well, but only once they are imported.
register_safe_globals()

_TORCH_NAMES = {
    name
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) or (isinstance(value, type) and name.endswith("Storage"))
} | {"Size", "device"}

_PLAIN = {
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "slice"),
    ("builtins", "complex"),
    ("builtins", "bytearray"),
    ("builtins", "list"),
    ("builtins", "dict"),
    ("builtins", "int"),
    ("_codecs", "encode"),
    ("pathlib", "PosixPath"),
    ("signal", "Signals"),
    ("io", "BytesIO"),
    ("_io", "BytesIO"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.storage", "UntypedStorage"),
    ("torch.serialization", "_get_layout"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.dtypes", "UInt32DType"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    # Megatron-LM's own enums and settings in its saved arguments.
    ("megatron.core.enums", "ModelType"),
    ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    ("megatron.core.rerun_state_machine", "RerunDiagnostic"),
    ("megatron.core.rerun_state_machine", "RerunMode"),
    ("megatron.core.rerun_state_machine", "RerunState"),
    ("megatron.core.transformer.enums", "AttnBackend"),
    ("megatron.core.transformer.enums", "CudaGraphScope"),
}

_INDEX = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    # megatron-core keeps the plans of all ranks in the index.
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
}


class Stub:
    """Stands for every object of a pickle that is only looked at: takes what it is given and does nothing."""

    def __new__(cls, *args: Any, **options: Any) -> Stub:
        return super().__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> Stub:
        return Stub()

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass


class _Checker(pickle.Unpickler):
    """Reads a pickle without making anything of it, and refuses names that are not on the list."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(file, encoding="bytes")
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN or (module == "torch" and name in _TORCH_NAMES):
            return Stub
        raise _refusal(self._name, module, name)

    def persistent_load(self, pid: Any) -> Any:
        return Stub()


class _IndexUnpickler(pickle.Unpickler):
    """Reads `.metadata`: plain records of torch.distributed.checkpoint and nothing else."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(file)
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX or (module == "torch" and name in _TORCH_NAMES):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 write a member of an enumeration
            return self._member
        raise _refusal(self._name, module, name)

    def _member(self, *arguments: Any) -> Enum:
        """A member of an enumeration on the list, and nothing else that `getattr` would give."""
        match arguments:
            case EnumMeta() as enumeration, str(name) if name in enumeration.__members__:
                return enumeration[name]
        raise _refusal(self._name, "builtins", "getattr")


# -- why a file cannot be read ----------------------------------------------------------------------------------------

PATH_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""What a path or its rights raise; other errors of the system are faults of a disk or of the network."""


def is_fault(error: BaseException | None) -> TypeGuard[OSError]:
    """Whether reading failed because of a disk or the network, and not because of the path or what the file holds."""
    if not isinstance(error, OSError) or isinstance(error, PATH_ERRORS):
        return False
    return error.errno not in (None, errno.EINVAL)  # a torn file can send its reader to before its beginning


def with_path(error: OSError, path: Path) -> OSError:
    """The same error with the file's name, which one of a read lacks."""
    return OSError(error.errno, error.strerror, str(path))


class FilePart(io.RawIOBase):
    """A part of a file that looks like a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0
        self.fault: OSError | None = None
        """Why the disk did not give a part: torch takes such an error for something else."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self._length - self._at), 0)
        self._file.seek(self._start + self._at)
        try:
            got = self._file.readinto(view[:count])
        except OSError as error:
            self.fault = error
            raise
        self._at += got
        return got


def _refusal(file: str, module: str, name: str) -> ValueError:
    return ValueError(
        f"{file} names {module}.{name}, which no checkpoint needs and which could run code on this machine: it is not "
        "opened; get the checkpoint from whom you trust and verify its checksums"
    )


def load_index(path: Path) -> Metadata:
    """Return what a checkpoint's `.metadata` says. Raises ValueError for a file that is torn or holds anything else."""
    try:
        index = _IndexUnpickler(io.BytesIO(path.read_bytes()), str(path)).load()
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001 - a torn pickle raises nearly anything
        if is_fault(error):
            raise with_path(error, path) from None
        raise ValueError(f"{path} cannot be read ({_short(error)}): load another checkpoint with --ckpt-step") from None
    if not isinstance(index, Metadata):
        raise ValueError(f"{path} is no index of a torch_dist checkpoint: load another with --ckpt-step")
    return index


def load_checked(source: Path | bytes, name: str) -> Any:
    """Return what `torch.save` wrote, after its pickle has passed the list. source: a file, or a file's bytes.

    Raises ValueError naming `name` for a pickle that names anything else, and for a torn file; OSError where the disk
    fails.
    """
    stream: Any = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")
    with stream:
        check_pickle(stream, name)
        whole = FilePart(stream, 0, stream.seek(0, os.SEEK_END))
        try:
            return torch.load(whole, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - torch's own unpickler refuses in many ways
            if whole.fault is not None:
                raise with_path(whole.fault, Path(name)) from None
            raise ValueError(f"{name} cannot be read ({_short(error)}): load another with --ckpt-step") from None


def check_pickle(stream: BinaryIO, name: str) -> None:
    """Raise ValueError, naming the file, unless the pickle in what `torch.save` wrote is on the list."""
    try:
        with zipfile.ZipFile(stream) as archive:
            for entry in archive.namelist():
                if entry.rsplit("/", 1)[-1] in ("data.pkl", "constants.pkl"):
                    _Checker(io.BytesIO(archive.read(entry)), name).load()
    except ValueError:
        raise
    except zipfile.BadZipFile as error:
        if is_fault(error.__context__):  # zipfile takes a disk that fails for no archive
            raise with_path(error.__context__, Path(name)) from None
        raise ValueError(
            f"{name} is torn, or was written by torch before 1.6: load another with --ckpt-step, or save it anew"
        ) from None
    except Exception as error:  # noqa: BLE001 - a torn pickle raises nearly anything
        if is_fault(error):
            raise with_path(error, Path(name)) from None
        raise ValueError(f"{name} cannot be read ({_short(error)}): load another with --ckpt-step") from None


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"


# -- checksums --------------------------------------------------------------------------------------------------------


def checksum_lines(sums: dict[str, str]) -> bytes:
    """Return the file that `sha256sum -c` reads, from file names to hex digests."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode()


def read_checksums(folder: Path) -> dict[str, str] | None:
    """Return file names to hex digests; None where a checkpoint has none, as those of other programs."""
    try:
        text = (folder / CHECKSUMS).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        if is_fault(error):
            raise with_path(error, folder / CHECKSUMS) from None
        raise _bad_sums(folder) from None
    sums = {}
    for line in text.splitlines():
        digest, separator, name = line.partition("  ")
        if len(digest) != 64 or not separator or not name or "/" in name:
            raise _bad_sums(folder)
        sums[name] = digest
    return sums


def _bad_sums(folder: Path) -> ValueError:
    return ValueError(f"{folder / CHECKSUMS} is damaged: load another checkpoint with --ckpt-step")


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file, read in pieces."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(piece):
            digest.update(piece[:size])
    return digest.hexdigest()


def verify_files(folder: Path, names: Sequence[str], sums: Mapping[str, str], num_threads: int) -> None:
    """Raises ValueError, one sentence, naming the first of the files that is damaged; OSError where the disk fails."""
    with ThreadPoolExecutor(num_threads) as threads:
        found = list(threads.map(lambda name: verify_file(folder, name, sums[name]), names))
    wrong = next(filter(None, found), None)
    if wrong is not None:
        raise ValueError(wrong)


def verify_file(folder: Path, name: str, expected: str) -> str | None:
    """Return one sentence about what is wrong with a file, None if nothing is. Raises OSError where the disk fails."""
    path = folder / name
    try:
        found = file_sha256(path)
    except OSError as error:
        if is_fault(error):
            raise with_path(error, path) from None
        return f"{path} cannot be read ({error.strerror}): load another checkpoint with --ckpt-step"
    if found == expected:
        return None
    return (
        f"{path} is damaged, its SHA-256 is {found[:12]}... and not {expected[:12]}... as in {CHECKSUMS}: load another "
        "checkpoint with --ckpt-step"
    )
