"""Writes, verifies, ranks, and resumes checkpoints; nothing is imported until it is asked for."""
