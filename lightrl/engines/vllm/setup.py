"""What a `VLLMEngine` needs to know of the machine before it starts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch

__all__ = ["chosen_gpus", "free_cached_memory", "free_port", "lacks_weights", "threads_per_engine"]


def chosen_gpus(first: int, count: int) -> str:
    """CUDA_VISIBLE_DEVICES of an engine with `count` of the visible GPUs, from number `first` on.

    Raises:
        ValueError: there are too few.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = visible.split(",") if visible else [str(i) for i in range(first + count)]
    chosen = numbers[first : first + count]
    if len(chosen) < count:
        raise ValueError(
            f"VLLMEngine.tensor_parallel_size={count}: cuda:{first // count}'s engine needs GPUs {first} to "
            f"{first + count - 1} of the {len(numbers)} visible ones; lower it or use fewer ranks."
        )
    return ",".join(chosen)


def free_cached_memory() -> None:
    """Gives back what the trainer's allocator holds and does not use."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def threads_per_engine(num_processes: int) -> int:
    """Threads that each of so many engine processes may use: half of the cores are the trainers'."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (2 * num_processes))


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on; of all interfaces where `host` is empty."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def lacks_weights(model: str) -> bool:
    """Whether it is a folder with a configuration alone."""
    folder = Path(model)
    return folder.is_dir() and not any(file.suffix in (".safetensors", ".bin", ".pt") for file in folder.iterdir())
