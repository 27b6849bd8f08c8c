#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct inside a LangGraph agent, on a CPU. Writes outputs/langgraph.
#   examples/langgraph/run.sh [--seed N]
# Environment variables: PYTHON (interpreter with LightRL; defaults to .venv/bin/python).
exec "$(dirname "$0")/../smollm2.sh" langgraph "$@"
