"""A simulated accelerator, the device `sim`: memory of the host that refuses what CUDA refuses.

    install()                      # once, in a process of its own: torch keeps the device until the process ends
    x = torch.ones(3, device="sim")
    x + torch.ones(3)              # RuntimeError: expected all tensors to be on the same device
    x.sum().item()                 # counted in HOST_READS, by kind, file and line

Made of torch's Python backend for PrivateUse1: a tensor `SimTensor` wraps one of the host, and each operation is run on
what is wrapped. As on CUDA, tensors without dimensions and index tensors may live on the host. It has no streams, no
Triton and no communication; the attention it takes is the one for devices without FlexAttention.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

__all__ = ["HOST_READS", "SimAccelerator", "SimTensor", "install", "on_sim"]

ROOT = Path(__file__).resolve().parent.parent.parent
HOST_READS: collections.Counter[tuple[str, str]] = collections.Counter()
"""(kind, "file:line") -> number of times that the host waited for the device there."""

DATA_DEPENDENT = {  # operations whose result's shape, or truth, the host must know
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::equal",
    "aten::unique_consecutive", "aten::unique_dim_consecutive",
}  # fmt: skip
INDEXING = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
}  # fmt: skip
COPIES = {"aten::_copy_from", "aten::copy_", "aten::_to_copy", "aten::_pin_memory"}


def place() -> str:
    """`file:line` of the innermost frame in the project's package, else of the innermost one in transformers."""
    frame, other = sys._getframe(1), "elsewhere"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(ROOT / "lightrl")):
            return f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}"
        if "/transformers/" in name and other == "elsewhere":
            other = f"transformers/{name.split('/transformers/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return other


def note(kind: str) -> None:
    HOST_READS[kind, place()] += 1


def is_sim(device: Any) -> bool:
    return device is not None and torch.device(device).type == "sim"


class SimTensor(Tensor):
    """A tensor of the device: it wraps one of the host, `elem`."""

    elem: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elem: Tensor) -> SimTensor:
        settings = {"strides": elem.stride(), "storage_offset": elem.storage_offset(), "dtype": elem.dtype}
        return Tensor._make_wrapper_subclass(cls, elem.size(), device=torch.device("sim:0"), **settings)  # type: ignore[attr-defined]

    def __init__(self, elem: Tensor) -> None:
        assert type(elem) is Tensor, type(elem)
        self.elem = elem

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, *args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"sim:{self.elem!r}"

    def tolist(self) -> Any:
        note("tolist")
        return self.elem.tolist()

    def item(self) -> Any:
        note("item")
        return self.elem.item()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a sim tensor to numpy; use Tensor.cpu() first.")

    __array__ = numpy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the host's tensor, which is where checkpoints are loaded to."""
        note("copy")
        return self.elem.__reduce_ex__(protocol)


def unwrap(x: Any) -> Any:
    return x.elem if isinstance(x, SimTensor) else x


def each(function: Any, x: Any) -> Any:
    """`function` of each leaf of tuples, lists, and dictionaries; torch's pytree takes three times as long."""
    kind = type(x)
    if kind is tuple or kind is list:
        return kind([each(function, y) for y in x])
    return {name: each(function, y) for name, y in x.items()} if kind is dict else function(x)


def refuse_mixed(name: str, operation: str, args: Any, leaves: list[Any]) -> None:
    host = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, SimTensor) and x.dim() > 0]
    if not host or operation in COPIES or (operation in INDEXING and isinstance(args[0], SimTensor)):
        return
    shapes = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in host)
    raise RuntimeError(
        f"{name}: expected all tensors to be on the same device, but found sim and cpu ({shapes}) at {place()}"
    )


def copied(operation: str, args: Any, kwargs: Any) -> Any:
    """Copies between the host and the device; those to the host are reads."""
    source = args[0]
    if operation == "aten::_copy_from":
        if isinstance(source, SimTensor) and not isinstance(args[1], SimTensor):
            note("copy")
        unwrap(args[1]).copy_(unwrap(source))
        return args[1]
    target = kwargs.get("device") or source.device
    if isinstance(source, SimTensor) and not is_sim(target):
        note("copy")
    kept = {name: value for name, value in kwargs.items() if name in ("dtype", "memory_format")}
    out = torch.ops.aten._to_copy.default(unwrap(source), **kept)
    return SimTensor(out) if is_sim(target) else out


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """One operation: refuses mixed devices, counts reads, runs it on the host and wraps what comes back."""
    name = func.name()
    operation = name.split(".")[0]
    leaves: list[Any] = []
    each(leaves.append, (args, kwargs))
    sims = [x for x in leaves if isinstance(x, SimTensor)]
    if sims:
        refuse_mixed(name, operation, args, leaves)
    if operation in ("aten::_to_copy", "aten::_copy_from"):
        return copied(operation, args, kwargs)
    if operation == "aten::_local_scalar_dense":
        note("item")
        return args[0].elem.item()
    if operation in DATA_DEPENDENT or (operation == "aten::repeat_interleave" and kwargs.get("output_size") is None):
        note(operation.removeprefix("aten::"))
    if operation in INDEXING:  # a mask as an index is a nonzero
        for index in args[1]:
            if isinstance(index, SimTensor) and index.dtype in (torch.bool, torch.uint8):
                note("mask as index")
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = False
    same = {id(x.elem): x for x in sims}  # what works in place gives the tensor that it was given
    args, kwargs = each(on_host, (args, kwargs))

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return same[id(x)] if id(x) in same else SimTensor(x)

    return each(wrap, func(*args, **kwargs))


def on_host(x: Any) -> Any:
    """Returns a tensor's copy on the host, or a generator for the host with the same seed."""
    if isinstance(x, torch.Generator) and x.device.type != "cpu":
        return torch.Generator().manual_seed(x.initial_seed())
    return unwrap(x)


def arange(*args: Any, dtype: Any = None, **_: Any) -> SimTensor:
    """torch's own resizes an empty tensor, which a wrapper cannot follow."""
    return SimTensor(torch.arange(*args, dtype=dtype, device="cpu"))


def without_gradients(mode: Any = True) -> Any:
    """In the place of `torch.inference_mode`, in which a Python backend's tensors have no views."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else contextlib.nullcontext()


def install() -> None:
    """Makes the device `sim`. Once in a process, which it changes for good, before anything else is imported."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("sim")
    torch.__future__.set_swap_module_params_on_conversion(True)  # `module.to` keeps tied weights tied, as on CUDA
    library = torch.library.Library("_", "IMPL")
    library.fallback(run, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for overload in ("arange", "arange.start", "arange.start_step"):
        aten.impl(overload, arange, "PrivateUse1")
    install.libraries = library, aten  # type: ignore[attr-defined]  # lives as long as the process
    torch.utils._device._device_constructors()  # lists, once and for all, what `with torch.device(...)` acts on
    host_tensor, torch.inference_mode = torch.tensor, without_gradients  # type: ignore[assignment, misc]

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        """`torch.tensor` fills memory that it takes for the host's."""
        device = torch.empty(0).device if device is None else device  # which `with torch.device(...)` decides
        if is_sim(device):
            return host_tensor(data, *args, device="cpu", **kwargs).to(device)
        return host_tensor(data, *args, device=device, **kwargs)

    torch.tensor = tensor  # type: ignore[assignment]
    module = torch.sim  # type: ignore[attr-defined]
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "synchronize": lambda device=None: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16, torch.float32],
    }.items():
        if not hasattr(module, name) or name in ("get_rng_state", "set_rng_state"):
            setattr(module, name, value)


class SimAccelerator(Accelerator):
    """Lightning's side of the device."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("sim:0")]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "sim"


def on_sim() -> dict[str, Any]:
    """Arguments of a Trainer that runs on the device."""
    return {"accelerator": SimAccelerator(), "strategy": SingleDeviceStrategy(device=torch.device("sim:0"))}
