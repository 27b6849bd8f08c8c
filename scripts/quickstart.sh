#!/usr/bin/env bash
# The main job: a supervised warm start, PPO, and a report whose path is the last line printed. Run it by `make quickstart`.
set -euo pipefail
cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"

engine=()
if ! "$bin/python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"; then
    echo "== vLLM is not installed: PPO samples with the transformers engine."
    engine=(--data.init_args.engine=lightrl.engines.TransformersEngine)
fi

if [ -d outputs/quickstart ]; then # a repeat starts anew and keeps the last one
    rm -rf outputs/quickstart.previous
    mv outputs/quickstart outputs/quickstart.previous
fi

echo "== 1/3 supervised warm start"
"$bin/lightrl" fit --config configs/quickstart/sft.yaml
echo "== 2/3 PPO"
"$bin/lightrl" fit --config configs/quickstart/ppo.yaml "${engine[@]}"
echo "== 3/3 report"
"$bin/lightrl" report outputs/quickstart/ppo
