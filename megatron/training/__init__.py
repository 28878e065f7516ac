"""The training layer: a GPT over megatron-core, with the optimizer of `deep_offload`.

This file must exist: as a namespace package of its own, ours would lose to any other `megatron.training` on the path.
`megatron/` itself must have none: that name is shared with megatron-core.
"""
