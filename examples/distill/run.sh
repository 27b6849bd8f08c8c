#!/usr/bin/env bash
# Trains a teacher and a smaller student, then distills on-policy, on a CPU. Writes outputs/distill.
#   examples/distill/run.sh
# Environment variables: PYTHON (interpreter with LightRL; defaults to .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
[ $# -eq 0 ] || { echo "usage: examples/distill/run.sh" >&2 && exit 2; }

lightrl() { "$python" -c "from lightrl.cli import main; main()" "$@"; }

started=$SECONDS
echo "== 1/3 SFT of the teacher on 70 sums"
lightrl fit --config examples/distill/teacher.yaml
echo "== 2/3 SFT of the student on other sums"
"$python" -m examples.distill.make_student outputs/distill/start
lightrl fit --config examples/distill/student.yaml
echo "== 3/3 On-policy distillation"
lightrl fit --config examples/distill/distill.yaml
echo "Took $((SECONDS - started)) s."
