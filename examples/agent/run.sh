#!/usr/bin/env bash
# Trains an agent on a CPU: model directory, SFT, GRPO over several turns, report. Takes a few minutes; writes
# outputs/agent.
#   examples/agent/run.sh [--engine TransformersEngine|VLLMEngine] [--seed N]
# Environment variables: PYTHON (interpreter with LightRL; defaults to .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false

engine=VLLMEngine seed=1
while [ $# -gt 0 ]; do
    case "$1" in
    --engine) engine="${2:?--engine needs a name}" && shift 2 ;;
    --seed) seed="${2:?--seed needs a number}" && shift 2 ;;
    *) echo "usage: examples/agent/run.sh [--engine TransformersEngine|VLLMEngine] [--seed N]" >&2 && exit 2 ;;
    esac
done

lightrl() { "$python" -c "from lightrl.cli import main; main()" "$@"; }

started=$SECONDS
echo "== 1/4 Make the model directory"
"$python" -m examples.agent.make_model outputs/agent/start
echo "== 2/4 SFT on careless demonstrations"
lightrl fit --config examples/agent/sft.yaml --seed_everything "$seed"
echo "== 3/4 GRPO with the calculator"
lightrl fit --config examples/agent/grpo.yaml --seed_everything "$seed" --data.init_args.engine="$engine"
echo "== 4/4 Report"
lightrl report outputs/agent/grpo
echo "Took $((SECONDS - started)) s."
