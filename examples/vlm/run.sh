#!/usr/bin/env bash
# Reinforcement learning on pictures from nothing, on a CPU: model folder -> SFT -> GRPO -> report. A few minutes; writes
# outputs/vlm.
#   examples/vlm/run.sh [--engine TransformersEngine|VLLMEngine]
# Settings: PYTHON (the interpreter that has LightRL, default .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false

engine=VLLMEngine
while [ $# -gt 0 ]; do
    case "$1" in
    --engine) engine="${2:?--engine needs a name}" && shift 2 ;;
    *) echo "usage: examples/vlm/run.sh [--engine TransformersEngine|VLLMEngine]" >&2 && exit 2 ;;
    esac
done

if ! "$python" -c "import torchvision" 2>/dev/null; then
    echo "Qwen2-VL's processor needs torchvision, which cannot be imported here: see scripts/setup.sh." >&2 && exit 1
fi

lightrl() { "$python" -c "from lightrl.cli import main; main()" "$@"; }

started=$SECONDS
echo "== 1/4 model folder"
"$python" -m examples.vlm.make_model outputs/vlm/start
echo "== 2/4 supervised warm start"
lightrl fit --config examples/vlm/sft.yaml
echo "== 3/4 GRPO"
lightrl fit --config examples/vlm/grpo.yaml --data.init_args.engine="$engine"
echo "== 4/4 report"
lightrl report outputs/vlm/grpo
echo "Took $((SECONDS - started)) s."
