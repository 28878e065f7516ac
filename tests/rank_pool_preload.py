"""What the server that forks the ranks of a pool imports once for all of them."""

import megatron.core.distributed  # noqa: F401
import megatron.core.optimizer  # noqa: F401
import torch  # noqa: F401
