"""Interleaved offload of Adam's state: an exact optimizer engine whose state lives in host memory.

Import from the submodules; this file stays empty so that the pure packages load without torch.
"""
