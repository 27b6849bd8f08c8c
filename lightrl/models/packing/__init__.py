"""Sequence layouts of a forward pass: token streams, attention over them, and micro-batches by tokens."""
