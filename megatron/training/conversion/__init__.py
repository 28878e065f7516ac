"""HuggingFace checkpoints to ours and back, on a CPU, one tensor at a time: see docs/huggingface.md."""
