"""Making and checking training data: JSONL in, Megatron's indexed datasets out. Nothing here imports torch."""
