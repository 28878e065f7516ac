"""Markers by folder, skips without devices, and the switch for the long product tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
_LEFT = pytest.StashKey[set[str]]()

# No test may reach a network or a display.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


def pytest_configure(config):
    if not config.pluginmanager.hasplugin("timeout"):
        # A machine without pytest-timeout still runs the suite: its settings become known words without effect.
        config.addinivalue_line("markers", "timeout(seconds): has no effect, pytest-timeout is not installed")


def _post_mortems():
    return {path.name for path in TESTS.parent.glob("postmortem_*")}


def pytest_sessionstart(session):
    session.config.stash[_LEFT] = _post_mortems()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """A run that fails leaves a directory beside itself: a test must not let it run in the repository."""
    result = yield
    left, item.config.stash[_LEFT] = item.config.stash[_LEFT], _post_mortems()
    new = sorted(item.config.stash[_LEFT] - left)
    assert not new, f"{', '.join(new)} in {TESTS.parent}: give what runs here a folder of its own"
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        folders = _folders(item)
        if "gpu" in folders:
            item.add_marker(pytest.mark.gpu)
        if "multi_gpu" in folders:
            item.add_marker(pytest.mark.multi_gpu)
    _skip_without_devices(items)
    if not config.getoption("--full"):
        long_ones = [item for item in items if item.get_closest_marker("full")]
        if long_ones:
            config.hook.pytest_deselected(items=long_ones)
            items[:] = [item for item in items if not item.get_closest_marker("full")]


def _folders(item):
    path = Path(str(item.path))
    return path.relative_to(TESTS).parts[:-1] if path.is_relative_to(TESTS) else ()


def _skip_without_devices(items):
    wanted = {1: [], 2: []}
    for item in items:
        if item.get_closest_marker("multi_gpu"):
            wanted[2].append(item)
        elif item.get_closest_marker("gpu"):
            wanted[1].append(item)
    if not any(wanted.values()):
        return
    import torch  # only where a test asks for a device: importing it takes seconds

    devices = torch.cuda.device_count()
    for least, tests in wanted.items():
        if devices < least:
            for item in tests:
                item.add_marker(pytest.mark.skip(reason=f"needs {least} CUDA device(s), this machine has {devices}"))
