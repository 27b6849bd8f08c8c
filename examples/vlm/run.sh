#!/usr/bin/env bash
# Trains a vision-language model on a CPU: model directory, SFT, GRPO, report. Takes a few minutes; writes outputs/vlm.
#   examples/vlm/run.sh [--engine TransformersEngine|VLLMEngine]
# Environment variables: PYTHON (interpreter with LightRL; defaults to .venv/bin/python).
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
    echo "torchvision can't be imported, but Qwen2-VL's processor needs it. Install it as in scripts/setup.sh." >&2 && exit 1
fi

lightrl() { "$python" -c "from lightrl.cli import main; main()" "$@"; }

started=$SECONDS
echo "== 1/4 Make the model directory"
"$python" -m examples.vlm.make_model outputs/vlm/start
echo "== 2/4 SFT"
lightrl fit --config examples/vlm/sft.yaml
echo "== 3/4 GRPO"
lightrl fit --config examples/vlm/grpo.yaml --data.init_args.engine="$engine"
echo "== 4/4 Report"
lightrl report outputs/vlm/grpo
echo "Took $((SECONDS - started)) s."
