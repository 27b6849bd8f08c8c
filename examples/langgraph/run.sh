#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct inside a LangGraph agent, on a CPU. Writes outputs/langgraph.
#   examples/langgraph/run.sh [--seed N]
# Environment variables: PYTHON (interpreter with LightRL; defaults to .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
export TOKENIZERS_PARALLELISM=false

seed=1
while [ $# -gt 0 ]; do
    case "$1" in
    --seed) seed="${2:?--seed needs a number}" && shift 2 ;;
    *) echo "usage: examples/langgraph/run.sh [--seed N]" >&2 && exit 2 ;;
    esac
done

started=$SECONDS
model="$("$python" -c "from lightrl.models.packaged import packaged_model; print(packaged_model('smollm2'))")"
"$python" -m lightrl fit --config examples/langgraph/grpo.yaml --seed_everything "$seed" \
    --model.init_args.actor.path "$model"
echo "Took $((SECONDS - started)) s."
