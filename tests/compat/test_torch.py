"""Each function says what torch's private parts must do; a new torch that changes them fails here."""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightrl.compat import torch as compat
from lightrl.engines.background import BackgroundLoop, release_threads


def test_persistent_buffers_are_those_of_the_state_dict() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[1].register_buffer("table", torch.zeros(3), persistent=False)
    module.register_buffer("steps", torch.zeros(1))
    parameters = {name for name, _ in module.named_parameters()}
    assert compat.persistent_buffers(module) == module.state_dict().keys() - parameters
    assert "1.table" not in compat.persistent_buffers(module)


class Runtime:
    """CUDA's runtime as `page_lock` sees it: notes its calls, and whether pages that are unlocked are still there."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes, flags))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        with open("/proc/self/maps") as lines:
            spans = [[int(x, 16) for x in line.split(maxsplit=1)[0].split("-")] for line in lines]
        self.calls.append(("unregister", address, any(first <= address < last for first, last in spans)))
        return 0


def test_shared_memory_is_page_locked_until_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    assert compat.page_lock(torch.zeros(8)) is None and runtime.calls == []  # this process uses no CUDA
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert compat.page_lock(torch.zeros(0)) is None and runtime.calls == []  # CUDA refuses nothing at all
    memory = torch.frombuffer(mmap.mmap(-1, 8192), dtype=torch.uint8)
    address = memory.data_ptr()
    assert compat.page_lock(memory) is not None
    assert runtime.calls == [("register", address, 8192, 1)]
    del memory
    assert runtime.calls[1:] == [("unregister", address, True)]
    released = compat.page_lock(kept := torch.zeros(8))
    assert released is not None
    released()
    released()
    del kept
    assert [call[0] for call in runtime.calls] == ["register", "unregister"] * 2


@pytest.mark.skipif("libgomp" not in Path("/proc/self/maps").read_text(), reason="another OpenMP library")
def test_a_thread_that_waits_has_no_openmp_team() -> None:
    """Two teams on as many cores as one of them needs slow each other down."""

    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    async def counted() -> int:
        return count()

    threads, loop = torch.get_num_threads(), BackgroundLoop("test")
    try:
        loop.run(counted())
        torch.set_num_threads(3)
        alone = count()
        values = torch.ones(1 << 20)
        assert float(values.exp().sum()) > 0
        assert count() == alone + 2
        assert loop.run(counted()) == alone
        assert torch.equal(values.exp(), torch.full_like(values, math.e)) and count() == alone + 2, "it starts again"
    finally:
        torch.set_num_threads(threads)
        release_threads()
        loop.close()


def test_a_block_mask_hides_what_the_function_hides() -> None:
    some = torch.ones(3, 3, dtype=torch.bool).tril()
    full = torch.ones(3, 3, dtype=torch.bool).tril(-1)
    mask = compat.flex_block_mask(lambda b, h, query, key: key <= query, some, full, torch.device("cpu"))
    assert mask.shape == (1, 1, 384, 384)
    assert mask.to_dense()[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]  # blocks of 128
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 2]]]


def test_fake_tensors_hold_nothing_and_say_which_share_memory() -> None:
    with compat.fake_tensors():
        x = torch.empty(1 << 40)  # four terabytes
        y = x.view(2, -1)
        assert compat.storage_key(x) == compat.storage_key(y)
        assert compat.storage_key(x) != compat.storage_key(torch.empty(1 << 40))
        assert y.sum(1).shape == (2,)
