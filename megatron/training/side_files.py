"""Files that a run can do without: that one cannot be written is said once, and training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def not_written(path: Path, error: OSError) -> str:
    """Return what the log says of a file that could not be written: its name, the reason, and that nothing ends."""
    return f"{path} could not be written ({error.strerror or error}); training goes on without it"


class SideFiles:
    """Writes that may fail, each file's first failure being a line of the log. A later write is tried again."""

    def __init__(self, report: Callable[[str], None]) -> None:
        """report: prints a line."""
        self._report = report
        self._said: set[Path] = set()

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Inside, an OSError leaves out what is left to do and goes no further."""
        try:
            yield
        except OSError as error:
            if path not in self._said:
                self._said.add(path)
                self._report(f"WARNING: {not_written(path, error)}")
