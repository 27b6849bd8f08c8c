#!/usr/bin/env bash
# Distillation from nothing, on a CPU: a teacher, a smaller student, on-policy distillation. Writes outputs/distill.
#   examples/distill/run.sh
# Settings: PYTHON (the interpreter that has LightRL, default .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
[ $# -eq 0 ] || { echo "usage: examples/distill/run.sh" >&2 && exit 2; }

lightrl() { "$python" -c "from lightrl.cli import main; main()" "$@"; }

started=$SECONDS
echo "== 1/3 the teacher learns 70 sums"
lightrl fit --config examples/distill/teacher.yaml
echo "== 2/3 the student learns other sums"
"$python" -m examples.distill.make_student outputs/distill/start
lightrl fit --config examples/distill/student.yaml
echo "== 3/3 the student samples, the teacher judges each token"
lightrl fit --config examples/distill/distill.yaml
echo "Took $((SECONDS - started)) s."
