"""Names in a checkpoint directory, its tracker, how a new checkpoint becomes visible, and which old ones stay.

Standard library only. A checkpoint is written under a hidden name and gets its own by a rename: a directory
`iter_NNNNNNN` is always complete. The tracker follows last.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
CHECKSUMS = "SHA256SUMS"
COMMON = "common.pt"
METADATA = ".metadata"
CONFIG = "metadata.json"
RELEASE = "release"

_NAME = re.compile(r"iter_(\d{7,})")
_UNFINISHED, _REPLACED, _DELETED = ".saving_", ".replaced_", ".deleted_"


def iteration_folder(root: Path, iteration: int | str) -> Path:
    """Return where the checkpoint of an iteration (or `release`) stands."""
    return root / (RELEASE if iteration == RELEASE else f"iter_{int(iteration):07d}")


def read_tracker(root: Path) -> int | str | None:
    """Return the iteration that the tracker names, or `release`; None without a tracker.

    Raises ValueError for a tracker that holds anything else.
    """
    try:
        text = (root / TRACKER).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{root / TRACKER} cannot be read ({error}): repair it or name one with --ckpt-step") from None
    if text == RELEASE:
        return RELEASE
    if not text.isdigit():
        raise ValueError(
            f"{root / TRACKER} holds {text[:40]!r}, it must hold an iteration or 'release': write the number of a "
            f"complete checkpoint into it ({_numbers(root)}) or give --ckpt-step"
        )
    return int(text)


def write_tracker(root: Path, iteration: int) -> None:
    """Let the tracker name `iteration`, durably and at once."""
    replace_file(root / TRACKER, str(iteration).encode())


def find_checkpoint(root: Path, step: int | None) -> tuple[Path, int | str] | None:
    """Return (folder, iteration) of the checkpoint to load: `step`, or what the tracker says; None without a tracker.

    Raises ValueError, one sentence, for a named checkpoint that is not there.
    """
    if not root.is_dir():
        if step is not None:
            raise ValueError(f"--ckpt-step {step}: --load {root} is not a directory: give the parent of iter_NNNNNNN")
        return None
    iteration = read_tracker(root) if step is None else step
    if iteration is None:
        if _NAME.fullmatch(root.name) and (root / CONFIG).exists():
            raise ValueError(f"--load {root} is one checkpoint, --load takes its parent: use --load {root.parent}")
        return None
    folder = iteration_folder(root, iteration)
    if folder.is_dir():
        return folder, iteration
    replaced = root / (_REPLACED + folder.name)
    if replaced.is_dir():  # a save of the same iteration died between its two renames
        return replaced, iteration
    said = f"--ckpt-step {step}" if step is not None else f"{root / TRACKER}"
    raise ValueError(f"{said} names iteration {iteration}, which {root} does not hold ({_numbers(root)}): name another")


def complete_iterations(root: Path) -> list[int]:
    """Return the iterations of all checkpoints in `root`, ascending."""
    if not root.is_dir():
        return []
    found = (_NAME.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in found if match)


def _numbers(root: Path) -> str:
    numbers = complete_iterations(root)
    return "it holds " + (", ".join(map(str, numbers)) if numbers else "no checkpoint")


# -- a new checkpoint -------------------------------------------------------------------------------------------------


def begin(root: Path, iteration: int) -> Path:
    """Make the hidden folder that a checkpoint is written into; what dead saves left behind is removed."""
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    folder = unfinished_folder(root, iteration)
    folder.mkdir()
    return folder


def unfinished_folder(root: Path, iteration: int) -> Path:
    """Return the hidden folder of a checkpoint that is being written."""
    return root / (_UNFINISHED + iteration_folder(root, iteration).name)


def publish(root: Path, iteration: int) -> Path:
    """Give a completely written checkpoint its name, durably; returns the folder. An older one of that name goes."""
    hidden, folder = unfinished_folder(root, iteration), iteration_folder(root, iteration)
    sync_folder(hidden)
    replaced = root / (_REPLACED + folder.name)
    if folder.exists():
        folder.rename(replaced)
    hidden.rename(folder)
    sync_folder(root)
    if replaced.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    return folder


def discard(root: Path, iteration: int) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(unfinished_folder(root, iteration), ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Remove hidden folders of saves and deletions that died; nobody else may be writing into `root`."""
    for entry in root.iterdir():
        if not entry.is_dir() or not entry.name.startswith((_UNFINISHED, _REPLACED, _DELETED)):
            continue
        if entry.name.startswith(_REPLACED):
            home = root / entry.name.removeprefix(_REPLACED)
            if not home.exists():
                entry.rename(home)
                continue
        shutil.rmtree(entry, ignore_errors=True)


def remove_old(root: Path, keep_last: int | None, retain_interval: int | None) -> list[int]:
    """Delete checkpoints beyond the newest `keep_last` that are no multiples of `retain_interval`; returns them.

    Without keep_last only the newest stays beside the multiples; without both nothing is deleted. What the tracker
    names is never deleted.
    """
    if keep_last is None and retain_interval is None:
        return []
    iterations, tracked = complete_iterations(root), read_tracker(root)
    newer = [i for i in iterations if isinstance(tracked, int) and i > tracked]
    older = [i for i in iterations if i not in newer]  # a run that went back must not lose what it has just written
    stays = set(older[-(keep_last or 1) :]) | {tracked}
    if retain_interval is not None:
        stays |= {i for i in iterations if i % retain_interval == 0}
    removed = []
    for iteration in older:
        if iteration not in stays:
            folder = iteration_folder(root, iteration)
            deleted = root / (_DELETED + folder.name)
            folder.rename(deleted)  # half a checkpoint must not look like a whole one
            shutil.rmtree(deleted, ignore_errors=True)
            removed.append(iteration)
    return removed


# -- durable files ----------------------------------------------------------------------------------------------------


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old or the new content, never a part, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    write_file(temporary, data)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk knows the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
