#!/usr/bin/env bash
# Start vLLM servers for `ServerEngine` on this node, one for each group of TP GPUs, and wait for them.
#   examples/cluster/servers.sh MODEL [arguments of vLLM, such as --max-model-len 4096]
# Environment variables:
#   GPUS: number of GPUs, default 8 (set 1 on a CPU)
#   TP: GPUs per server, default 1
#   PORT: port of the first server, default 8000; the other servers use the following ports
#   HOST: address to bind, default the node's first. Never use a public address: anyone who reaches a server in
#     development mode can run code on it
#   WEIGHTS: path or transfer, as in ServerEngine
#   PYTHON: Python interpreter
set -euo pipefail
model="${1:?usage: examples/cluster/servers.sh MODEL [arguments of vLLM]}"
shift
python="${PYTHON:-python}" gpus="${GPUS:-8}" tp="${TP:-1}" port="${PORT:-8000}"
host="${HOST:-$(hostname -I | cut -d' ' -f1)}"
case "${WEIGHTS:-path}" in
path) weights=(--worker-extension-cls lightrl.engines.server.worker.ServerWorker) ;;
transfer) weights=(--weight-transfer-config '{"backend": "nccl"}') ;;
*) echo "WEIGHTS=$WEIGHTS: must be path or transfer" >&2 && exit 2 ;;
esac

export VLLM_SERVER_DEV_MODE=1 # enables the routes that change weights
for ((first = 0; first < gpus; first += tp)); do
    devices="$(seq -s, "$first" $((first + tp - 1)))"
    CUDA_VISIBLE_DEVICES="$devices" "$python" -m vllm.entrypoints.openai.api_server \
        --model "$model" --host "$host" --port $((port + first / tp)) --tensor-parallel-size "$tp" \
        --dtype bfloat16 --logprobs-mode processed_logprobs "${weights[@]}" "$@" &
    echo "http://$host:$((port + first / tp)) on GPU $devices"
done
trap 'kill $(jobs -p) 2>/dev/null; wait' INT TERM
wait
