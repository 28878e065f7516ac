"""Leave out what megatron-core says about packages that this program does not need. Standard library only.

To be called before the first import of `megatron.core`, which warns while it is imported, once for each module.
"""

from __future__ import annotations

import warnings

_MISSING_PACKAGES = r"(Transformer Engine and Apex are|Apex is) not installed\. Falling back to "


def leave_out_known_warnings() -> None:
    """Filter these warnings of megatron-core by their text; every other warning is shown as before."""
    warnings.filterwarnings("ignore", _MISSING_PACKAGES, UserWarning, r"megatron\.core\.")
    # Its own calls and settings: nothing that a user could change.
    warnings.filterwarnings("ignore", r".torch\.distributed\.\w+. is deprecated")
    warnings.filterwarnings("ignore", "full scope is deprecated", module=r"megatron\.core")
