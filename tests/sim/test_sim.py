"""Nothing in training mixes host and device tensors, and the host waits for the device only where it is named."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightrl import callbacks
from tests.sim.names import KINDS, NAMED

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CASES = [
    *NAMED, *KINDS,
    "layout padded", "layout packed", "layout shared_prefix", "lora", "gradient checkpointing", "shared critic",
    "critic and reference of their own", "frozen reference in bfloat16", "bf16-mixed", "bf16-true",
    "masks, clips and an entropy bonus", "vision", "callbacks that take part",
    "an environment of several turns", "models leave the device while the engine samples", "adaptive KL", "linear KL",
    "checkpoint and resume", "the same update as on the CPU", "a planted mix-up",
]  # fmt: skip
PER_MICRO_BATCH = {"ppo": 0.0, "grpo": 0.0}
"""Host reads that one more micro-batch costs: layouts are planned from the copies that records keep on the host."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Name -> what the case's run wrote; one process runs all that were selected, budgets always."""
    chosen = [item.callspec.params["name"] for item in request.session.items if "sim" in item.nodeid
              and hasattr(item, "callspec") and "name" in item.callspec.params]  # fmt: skip
    out = tmp_path_factory.mktemp("sim") / "results.jsonl"
    names = [*dict.fromkeys(chosen), *(f"budget {a} {size}" for a in PER_MICRO_BATCH for size in ("few", "many"))]
    command = [sys.executable, "-m", "tests.sim", str(out), *names]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=800, capture_output=True)
    return {line["name"]: line for line in map(json.loads, out.read_text().splitlines())}


LONG = {f"loss {name}" for name in ("CPG", "GMPO", "GSPO", "PPOClip", "RLOOSequence", "SAPO")}
LONG |= {f"advantage {name}" for name in ("GAE", "GroupRelative", "RLOO", "ReinforcePlusPlus", "MaxRL", "OPO")}
LONG |= {f"aggregation {name}" for name in ("ConstantLength", "SequenceMean", "TokenMean")}
LONG |= {f"loss {name}" for name in ("CISPO", "OffPolicyCorrection", "VESPO", "GeometricRejection")}
LONG |= {f"advantage {name}" for name in ("GDPO", "PassAtK", "Reinforce", "ReinforcePlusPlusBaseline", "TurnReturns")}
LONG |= {"CPGDLightningModule", "GSPOLightningModule", "RLOOLightningModule", "bf16-true"}
LONG |= {"DAPOLightningModule", "DrGRPOLightningModule", "frozen reference in bfloat16", "linear KL", "layout padded"}
LONG |= {"loss OffPolicySequenceMask", "loss RolloutRatio", "advantage GiGPO", "aggregation SequenceSum"}
LONG |= {"layout packed", "shared critic", "ReinforcePlusPlusLightningModule"}
"""What an algorithm with a case of its own uses, and close variants of other cases: with `-m long` only."""
assert set(CASES) >= LONG


def marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.long) if name in LONG else name


@pytest.mark.parametrize("name", map(marked, CASES))
def test_a_step_mixes_no_devices(name: str, results: dict[str, Any]) -> None:
    assert results[name]["error"] is None, results[name]["error"]


@pytest.mark.parametrize("algorithm", PER_MICRO_BATCH)
def test_host_reads_of_a_micro_batch_stay_within_the_budget(algorithm: str, results: dict[str, Any]) -> None:
    few, many = (results[f"budget {algorithm} {size}"] for size in ("few", "many"))
    assert few["error"] is None and many["error"] is None
    more = many["micro_batches"] - few["micro_batches"]
    assert more >= 4
    lines = {line: (count - few["reads"].get(line, 0)) / more for line, count in many["reads"].items()}
    listed = "\n".join(f"{reads:.1f} per micro-batch at {line}" for line, reads in sorted(lines.items()) if reads > 0)
    assert sum(lines.values()) <= PER_MICRO_BATCH[algorithm], listed


def test_every_callback_that_takes_part_has_a_case() -> None:
    """The others watch the run's processes and folders, or write what `predict` returns."""
    cases = (ROOT / "tests" / "sim" / "cases.py").read_text()
    elsewhere = {"PredictionWriter"}
    assert {name for name in callbacks.__all__ if f".{name}(" not in cases} == elsewhere


def test_the_device_is_imported_by_no_other_test() -> None:
    """It changes torch for the process: only `python -m tests.sim` may."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "tests.sim.device":
                assert path.name in ("cases.py", "__main__.py"), path
