"""CPU seconds of a run's startup: imports of the dependencies, imports of LightRL, and reading the configuration.

    python benchmarks/startup.py --repeats 5 --out results/startup.json

Each number is from a separate process. `dependencies` imports exactly the modules of other packages that LightRL's
import loads, in the same order. `imports` imports LightRL and every class that a configuration can name. `start` runs
`lightrl fit` of the quickstart's PPO until all objects are built, without starting an engine. The three alternate;
medians and ranges are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = """
import lightrl.cli, lightrl.checkpoints.run_folder
import lightrl.algorithms, lightrl.callbacks, lightrl.data, lightrl.engines, lightrl.environments, lightrl.objectives
import lightrl.rewards, lightrl.rollout, lightning.pytorch.cli, jsonargparse
[getattr(lightrl.engines, name) for name in lightrl.engines.__all__]
"""
LIST = "import sys, json; print(json.dumps([m for m in sys.modules if not m.startswith('lightrl')]))"
DEPENDENCIES = """
import contextlib, importlib, json, sys
for name in json.load(open(sys.argv[1])):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
"""
START = IMPORTS + "lightrl.cli.run(['--config', sys.argv[1], '--trainer.logger=false'], run=False)"
CLOCK = "\nimport time; print(time.process_time())"


def ask(code: str, *arguments: str) -> str:
    """The last line that a Python process prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", "import sys\n" + code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as modules:
        modules.write(ask(IMPORTS + LIST))
        modules.flush()
        sides = {
            "dependencies": (DEPENDENCIES, modules.name),
            "imports": (IMPORTS,),
            "start": (START, "configs/quickstart/ppo.yaml"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(args.repeats):
            for name, (code, *arguments) in sides.items():
                seconds[name].append(float(ask(code + CLOCK, *arguments)))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print("| | CPU s | range | of the dependencies' |\n|---|---|---|---|")
    for name, values in seconds.items():
        span = f"{min(values):.2f}-{max(values):.2f}"
        print(f"| {name} | {medians[name]:.2f} | {span} | {medians[name] / medians['dependencies']:.2f} |")
    print(f"start / imports: {medians['start'] / medians['imports']:.2f}")
    if args.out is not None:
        args.out.write_text(json.dumps({"seconds": seconds, "medians": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main()
