#!/usr/bin/env bash
# One training run over several nodes with torchrun. Run it on each node with the same arguments:
#   NODES=2 HEAD=10.0.0.1 examples/cluster/torchrun.sh --config configs/recipes/RECIPE.yaml \
#       --config configs/overlays/8gpu.yaml --config configs/strategies/fsdp2.yaml
# Environment variables: NODES (number of nodes), HEAD (address of one node), PORT (a free port on that node, default
# 29500), GPUS (processes per node, default 8), PYTHON. If a node fails, the run ends on all nodes. Add --ckpt_path last
# to resume.
set -euo pipefail
python="${PYTHON:-python}" gpus="${GPUS:-8}"
exec "$python" -m torch.distributed.run --nnodes "${NODES:?}" --nproc-per-node "$gpus" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:?}:${PORT:-29500}" --rdzv-id lightrl \
    --no-python "$python" -c "from lightrl.cli import main; main()" \
    fit "$@" --trainer.num_nodes "$NODES" --trainer.devices "$gpus"
