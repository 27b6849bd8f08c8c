"""Weight push from the trainer to servers, through a shared directory or over NCCL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import time
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from torch import Tensor

from lightrl.compat.vllm_process import transfer_group
from lightrl.engines.base import EngineDiedError
from lightrl.engines.server.client import Server, ServerError, ServerLostError
from lightrl.engines.server.pool import ServerPool

_BUCKET_BYTES = 1 << 30

Named = tuple[str, Tensor]


class Transport(ABC):
    """Base class of weight transports to a pool of servers. Matrices are pushed in `dtype`, vectors in their own."""

    def __init__(self, pool: ServerPool, dtype: torch.dtype) -> None:
        self.pool = pool
        self.dtype = dtype

    @abstractmethod
    def push(self, tensors: Iterable[Named], token: str) -> None:
        """Loads the tensors into all live servers. Sets `loaded` to `token` on success.

        Raises a ValueError if the weights don't match a server's model.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Frees resources kept between pushes."""

    def _live(self) -> Iterator[Server]:
        return (server for server in self.pool.servers if server.lost is None)

    def _each(self, work: Callable[[Server], Awaitable[Any]]) -> None:
        """Runs `work` on all live servers concurrently. Ignores servers that are lost and raises other errors."""

        async def run() -> list[Any]:
            return await asyncio.gather(*(work(server) for server in self._live()), return_exceptions=True)

        for result in self.pool.loop.run(run()):
            if isinstance(result, BaseException) and not isinstance(result, ServerLostError):
                raise result

    async def _pause(self, server: Server, token: str) -> None:
        server.loaded = None
        await self.pool.protocol.pause(server, f"loading {token}")

    async def _resume(self, server: Server, token: str) -> None:
        await self.pool.protocol.resume(server, token)
        server.loaded = token

    def _buckets(self, tensors: Iterable[Named]) -> Iterator[list[Named]]:
        """Yields lists of tensor copies, at most one bucket at a time."""
        bucket: list[Named] = []
        size = 0
        for name, tensor in tensors:
            matrix = tensor.is_floating_point() and tensor.ndim > 1
            tensor = tensor.detach().to(self.dtype if matrix else tensor.dtype)
            if bucket and size + tensor.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor.clone().contiguous()))  # the original may be overwritten
            size += tensor.nbytes
        if bucket:
            yield bucket


class FolderTransport(Transport):
    """Writes safetensors files to a shared directory, from which the servers load them.

    The directory contains one copy of the model, and two during a push. The model's config is saved with the weights,
    so that the result is a Hugging Face checkpoint.
    """

    def __init__(self, pool: ServerPool, dtype: torch.dtype, folder: Path, config: Any) -> None:
        super().__init__(pool, dtype)
        self.folder = folder
        self.config = config
        self._current: Path | None = None

    def push(self, tensors: Iterable[Named], token: str) -> None:
        target = self.folder / f"weights-{token}"
        try:
            files = self._write(target, tensors)
            self._each(lambda server: self._load(server, target, files, token))
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        self.close()
        self._current = target

    def _write(self, target: Path, tensors: Iterable[Named]) -> list[str]:
        from safetensors.torch import save_file

        target.mkdir(parents=True)
        self.config.save_pretrained(target)
        index: dict[str, str] = {}
        total = 0
        for number, bucket in enumerate(self._buckets(tensors), start=1):
            file = f"model-{number:05d}.safetensors"
            save_file({name: tensor.cpu() for name, tensor in bucket}, target / file, metadata={"format": "pt"})
            index |= {name: file for name, _ in bucket}
            total += sum(tensor.nbytes for _, tensor in bucket)
        table = {"metadata": {"total_size": total}, "weight_map": index}
        (target / "model.safetensors.index.json").write_text(json.dumps(table))
        return sorted(set(index.values()))

    async def _load(self, server: Server, folder: Path, files: list[str], token: str) -> None:
        await self._pause(server, token)
        await self.pool.protocol.load_files(server, str(folder), files, token)
        await self._resume(server, token)

    def close(self) -> None:
        """Deletes the current weights."""
        if self._current is not None:
            shutil.rmtree(self._current, ignore_errors=True)
            self._current = None


class TransferTransport(Transport):
    """Broadcasts each tensor to a server's workers with vLLM's weight transfer over NCCL.

    Each server has a separate communicator, so servers can die and come back independently. Written for vLLM 0.32.
    Tested with a CPU communicator; NCCL has not been tested. See `Transport` for the arguments.
    """

    def __init__(self, pool: ServerPool, dtype: torch.dtype) -> None:
        super().__init__(pool, dtype)
        self._groups: dict[tuple[str, int], Any] = {}  # by server life, since a restarted server needs a new group

    def push(self, tensors: Iterable[Named], token: str) -> None:
        self._each(lambda server: self._pause(server, token))
        for server in self._live():
            self._connect(server)
        self._each(lambda server: server.post("/start_weight_update"))
        for bucket in self._buckets(tensors):
            update = {
                "names": [name for name, _ in bucket],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
            }
            for server in self._live():
                self._send(server, update, [tensor for _, tensor in bucket])
        self._each(lambda server: self._finish(server, token))

    def _connect(self, server: Server) -> None:
        if server.life in self._groups:
            return
        size = 1 + int(self.pool.loop.run(server.get("/get_world_size"))["world_size"])
        host, port = _own_address(server.url), find_free_network_port()
        group = {"master_address": host, "master_port": port, "world_size": size}
        body = {"init_info": group | {"rank_offset": 1, "packed": False}}
        request = self.pool.loop.submit(server.post("/init_weight_transfer_engine", body))
        self._groups[server.life] = transfer_group(host, port, size)
        request.result()

    def _send(self, server: Server, update: dict[str, Any], tensors: Iterable[Tensor]) -> None:
        request = self.pool.loop.submit(server.post("/update_weights", {"update_info": update}))
        for tensor in tensors:
            self._groups[server.life].broadcast(tensor, src=0)
        self._drain(request)
        try:
            with contextlib.suppress(ServerLostError):
                request.result()
        except ServerError as error:
            raise ValueError(f"{server.url} could not load the weights: {error.text[:500]}") from error

    def _drain(self, request: Any) -> None:
        """Waits for the broadcasts with a time limit, because NCCL would wait for a dead server forever."""
        if not torch.cuda.is_available():
            return
        event = torch.cuda.Event()
        event.record()
        deadline = None
        while not event.query():
            if deadline is None and request.done() and request.exception() is not None:
                deadline = time.monotonic() + self.pool.timeout
            if deadline is not None and time.monotonic() > deadline:
                raise EngineDiedError(f"A server failed during a weight broadcast: {request.exception()}")
            time.sleep(0.001)

    async def _finish(self, server: Server, token: str) -> None:
        await server.post("/finish_weight_update")
        await self._resume(server, token)


def _own_address(url: str) -> str:
    """Returns the address of the network interface used to reach `url`."""
    parts = urllib.parse.urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "localhost", parts.port or 80))
        return str(probe.getsockname()[0])
