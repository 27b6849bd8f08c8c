#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct on a verifiers task set, on a CPU. Writes outputs/verifiers.
#   examples/verifiers/run.sh [--seed N]
# Environment variables: LIGHTRL_VERIFIERS_PYTHON (interpreter with verifiers), PYTHON (interpreter with LightRL; defaults
# to .venv/bin/python).
set -euo pipefail
: "${LIGHTRL_VERIFIERS_PYTHON:?set it to an interpreter with verifiers, see docs/verifiers.md}"
here="$(cd "$(dirname "$0")" && pwd)"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec "$here/../smollm2.sh" verifiers "$@"
