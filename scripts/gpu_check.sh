#!/usr/bin/env bash
# Checks LightRL on one GPU, without network, in under ten minutes: scripts/gpu_check.sh [--out gpu.json] [--vllm] [--device cpu --tiny]
# Each step runs in a process of its own with a time limit; the report is rewritten after each, and a failure stops none.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
export PYTHONPATH="$root:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python}" "$root/scripts/gpu_check.py" "$@"
