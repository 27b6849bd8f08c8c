"""Layouts of sequences in a forward pass: streams, attention over them, micro-batches by tokens."""
