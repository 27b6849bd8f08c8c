#!/usr/bin/env bash
# Runs GRPO on tiny Python tasks with hidden tests in a sandbox, on a CPU. Writes outputs/code.
#   examples/code/run.sh [--seed N]
# Environment variables: PYTHON (interpreter with LightRL; defaults to .venv/bin/python).
exec "$(dirname "$0")/../smollm2.sh" code "$@"
