#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct on a verifiers task set, on a CPU. Writes outputs/verifiers.
#   examples/verifiers/run.sh [--seed N]
# Environment variables: LIGHTRL_VERIFIERS_PYTHON (interpreter with verifiers), PYTHON (interpreter with LightRL; defaults
# to .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
export TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD/examples/verifiers${PYTHONPATH:+:$PYTHONPATH}"
: "${LIGHTRL_VERIFIERS_PYTHON:?set it to an interpreter with verifiers, see docs/verifiers.md}"

seed=1
while [ $# -gt 0 ]; do
    case "$1" in
    --seed) seed="${2:?--seed needs a number}" && shift 2 ;;
    *) echo "usage: examples/verifiers/run.sh [--seed N]" >&2 && exit 2 ;;
    esac
done

started=$SECONDS
model="$("$python" -c "from lightrl.models.packaged import packaged_model; print(packaged_model('smollm2'))")"
"$python" -m lightrl fit --config examples/verifiers/grpo.yaml --seed_everything "$seed" \
    --model.init_args.actor.path "$model"
echo "Took $((SECONDS - started)) s."
