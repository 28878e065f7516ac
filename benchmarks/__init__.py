"""Measurements of the engine, the training loop and its peers, in parts that can be run on their own."""
