#!/usr/bin/env bash
# Runs RLHF on a CPU: SFT, reward model, PPO, win rate. Takes about ten minutes; writes outputs/rlhf.
#   examples/rlhf/run.sh [--engine TransformersEngine|VLLMEngine]
# Environment variables: PYTHON (interpreter with LightRL; defaults to .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false

engine=TransformersEngine # faster than vLLM for such a small model, because vLLM starts slowly
while [ $# -gt 0 ]; do
    case "$1" in
    --engine) engine="${2:?--engine needs a name}" && shift 2 ;;
    *) echo "usage: examples/rlhf/run.sh [--engine TransformersEngine|VLLMEngine]" >&2 && exit 2 ;;
    esac
done

lightrl() { "$python" -c "from lightrl.cli import main; main()" "$@"; }

started=$SECONDS
echo "== 1/4 SFT on careless answers"
lightrl fit --config examples/rlhf/sft.yaml
echo "== 2/4 Reward model from noisy preferences"
lightrl fit --config examples/rlhf/reward.yaml
echo "== 3/4 PPO against the reward model"
lightrl fit --config examples/rlhf/ppo.yaml --data.init_args.engine="$engine"
echo "== 4/4 Win rate by the true preference"
"$python" -m examples.rlhf.win_rate outputs/rlhf/sft/model outputs/rlhf/ppo/model outputs/rlhf/reward/model
echo "Took $((SECONDS - started)) s."
