"""Writes, verifies, ranks, and resumes checkpoints. Modules are imported on demand."""
