"""Property tests here are the same in every run, and not timed: other programs may share the cores."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("same_every_run", deadline=None, derandomize=True, database=None)
settings.load_profile("same_every_run")
