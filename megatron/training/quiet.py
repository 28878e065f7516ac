"""Leave out what megatron-core and torch say that no user of this program could act on. Standard library only.

To be called before the first import of `megatron.core`, which warns while it is imported, once for each module.
"""

from __future__ import annotations

import warnings

_MISSING_PACKAGES = r"(Transformer Engine and Apex are|Apex is) not installed\. Falling back to "


def leave_out_known_warnings() -> None:
    """Filter these warnings by their text; every other warning is shown as before."""
    warnings.filterwarnings("ignore", _MISSING_PACKAGES, UserWarning, r"megatron\.core\.")
    # Its own calls and settings: nothing that a user could change.
    warnings.filterwarnings("ignore", r".torch\.distributed\.\w+. is deprecated")
    warnings.filterwarnings("ignore", "full scope is deprecated", module=r"megatron\.core")
    # The device is set before any group is made, so the current one is the right one.
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context", UserWarning, r"torch\.")
