"""Fast paths on CPU: fused norms, SwiGLU and rotary embedding, attention over token streams, and a decoder.

Each has a plain counterpart that runs where it is switched off: the model's own modules, scaled-dot-product attention
with a mask, and the model's own forward with transformers' cache. With them the process keeps the memory that it frees.
`LIGHTRL_CPU_KERNELS=0` switches all off that no argument switches on; `ModelSpec.cpu_kernels` decides for one model of
the trainer, `TransformersEngine.cpu_kernels` for one engine.
"""

from __future__ import annotations

import os

__all__ = ["enabled"]

VARIABLE = "LIGHTRL_CPU_KERNELS"


def enabled(argument: bool | None = None) -> bool:
    """Whether to use the kernels: what the argument says, or without one the variable `LIGHTRL_CPU_KERNELS`.

    Args:
        argument: such as `ModelSpec.cpu_kernels`; None asks the environment, where "1" (the default) is on, "0" off.

    Raises:
        ValueError: the variable is set to anything else.
    """
    if argument is not None:
        return argument
    value = os.environ.get(VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={value!r}: must be 0 (off) or 1 (on, the default).")
    return value == "1"
