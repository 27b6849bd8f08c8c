"""The launch scripts of examples/cluster: two torchrun agents as two machines, which share rollout servers.

The servers speak SGLang's routes (`tests/engines/sglang_server.py`). vLLM's are started by `servers.sh` in
`tests/engines/test_server_vllm.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from tests.engines.sglang_server import SGLangServer
from tests.ports import held_port
from tests.toys import quickstart_model, write_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PROBE = '''
import json, os
from lightning.pytorch import Callback
from lightrl.callbacks import WeightSync

class Probe(Callback):
    """What each rank sees at the end of each rollout."""
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        engine = trainer.datamodule.engine
        gaps = [c.last_gap for c in trainer.callbacks if isinstance(c, WeightSync)]
        row = {"rank": trainer.global_rank, "world": trainer.world_size, "nodes": trainer.num_nodes,
               "local": trainer.local_rank, "token": engine._pool.token, "gap": gaps[0],
               "prompts": sorted(set(batch.prompts)), "version": batch.policy_version,
               "weights": float(sum(p.detach().double().sum() for p in module.actor.parameters()))}
        with open(f"rank-{trainer.global_rank}.jsonl", "a") as file:
            print(json.dumps(row), file=file)
'''


@pytest.mark.long
def test_two_machines_train_together_on_shared_servers(tmp_path: Path, root: Path) -> None:
    """Rank 0 pushes, both ranks sample their own prompts on both servers with the same version of the weights."""
    model = quickstart_model(tmp_path / "model")
    (tmp_path / "probe.py").write_text(PROBE)
    engine = {"urls": ["http://none:1"], "kind": "sglang", "shared_folder": "weights"}
    data = {
        "rewards": [{"class_path": "ExactAnswer"}, "tests.toys:digits_reward"],
        "engine": {"class_path": "ServerEngine", "init_args": engine},
        "sampling": {"max_new_tokens": 4}, "rollouts_per_epoch": 2,
    }  # fmt: skip
    optimizer = {"optimizer": {"class_path": "AdamW", "init_args": {"lr": 1e-2}}}
    trainer = {"strategy": "ddp", "callbacks": [{"class_path": "WeightSync"}, {"class_path": "probe.Probe"}]}
    write_run(tmp_path / "run.yaml", model, trainer=trainer, model={"kl": None, **optimizer}, data=data)
    servers = [SGLangServer(tmp_path / "model") for _ in range(2)]
    urls = [server.start() for server in servers]
    holder = held_port()
    port = str(holder.getsockname()[1])
    settings = {"NODES": "2", "GPUS": "1", "HEAD": "127.0.0.1", "PORT": port, "PYTHON": sys.executable}
    settings |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = ["bash", str(root / "examples" / "cluster" / "torchrun.sh"), "--config", "run.yaml"]
    command += ["--data.init_args.engine.init_args.urls", json.dumps(urls)]
    options: dict[str, Any] = {"cwd": tmp_path, "env": os.environ | settings, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    agents = [subprocess.Popen(command, **options) for _ in range(2)]
    try:
        outputs = [agent.communicate(timeout=550)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, 9)
        for server in servers:
            server.stop()
        holder.close()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)[-4000:]
    ranks = [[json.loads(x) for x in (tmp_path / f"rank-{r}.jsonl").read_text().splitlines()] for r in range(2)]
    assert [len(rows) for rows in ranks] == [2, 2]
    for first, second in zip(*ranks, strict=True):
        assert (first["rank"], second["rank"]) == (0, 1)
        assert first["world"] == second["world"] == 2 and first["nodes"] == second["nodes"] == 2
        assert first["local"] == second["local"] == 0  # each machine has one process
        for same in ("token", "version", "weights"):
            assert first[same] == second[same], same
        assert not set(first["prompts"]) & set(second["prompts"])
        assert max(first["gap"], second["gap"]) < 1e-5
    assert ranks[0][0]["weights"] != ranks[0][1]["weights"]
    for server in servers:
        assert server.calls["/update_weights_from_disk"] == 2
        groups = [request for request in server.requests if isinstance(request["input_ids"][0], list)]
        assert len(groups) == 4  # of 2 rollouts with 4 prompts: half of them
