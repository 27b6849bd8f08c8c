#!/usr/bin/env bash
# One training run over several machines, with torchrun. Start it on each of them, with the same arguments:
#   NODES=2 HEAD=10.0.0.1 examples/cluster/torchrun.sh --config configs/recipes/RECIPE.yaml \
#       --config configs/overlays/8gpu.yaml --config configs/strategies/fsdp2.yaml \
#       --trainer.strategy.init_args.data_parallel_size 16
# Settings: NODES (number of machines), HEAD (address of one of them), PORT (free there, default 29500), GPUS (processes
# per machine, default 8), PYTHON. A machine that fails ends the run on all; add --ckpt_path last to resume.
set -euo pipefail
python="${PYTHON:-python}" gpus="${GPUS:-8}"
exec "$python" -m torch.distributed.run --nnodes "${NODES:?}" --nproc-per-node "$gpus" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:?}:${PORT:-29500}" --rdzv-id lightrl \
    --no-python "$python" -c "from lightrl.cli import main; main()" \
    fit "$@" --trainer.num_nodes "$NODES" --trainer.devices "$gpus"
