"""The Adam update: specification in torch, compiled CPU kernel, Triton kernel. One set of bits."""
