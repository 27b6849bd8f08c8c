#!/usr/bin/env bash
# Runs an example's configuration with SmolLM2-135M-Instruct, on a CPU. Writes outputs/EXAMPLE.
#   examples/smollm2.sh EXAMPLE [--seed N]
# Environment variables: PYTHON (interpreter with LightRL; defaults to .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
example="${1:?usage: examples/smollm2.sh EXAMPLE [--seed N]}" && shift
export TOKENIZERS_PARALLELISM=false

seed=1
while [ $# -gt 0 ]; do
    case "$1" in
    --seed) seed="${2:?--seed needs a number}" && shift 2 ;;
    *) echo "usage: examples/$example/run.sh [--seed N]" >&2 && exit 2 ;;
    esac
done

started=$SECONDS
model="$("$python" -c "from lightrl.models.packaged import packaged_model; print(packaged_model('smollm2'))")"
"$python" -m lightrl fit --config "examples/$example/grpo.yaml" --seed_everything "$seed" \
    --model.init_args.actor.path "$model"
echo "Took $((SECONDS - started)) s."
