#!/usr/bin/env bash
# Checks LightRL on one GPU in under ten minutes, without network access:
#   scripts/gpu_check.sh [--out gpu.json] [--vllm] [--device cpu --tiny]
# Each step runs in a separate process with a time limit. The report is updated after each step, including failed ones.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
export PYTHONPATH="$root:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python}" "$root/scripts/gpu_check.py" "$@"
