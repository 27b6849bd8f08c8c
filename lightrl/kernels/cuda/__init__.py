"""Kernels of other packages on CUDA, where they are installed."""
