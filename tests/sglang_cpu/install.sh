#!/usr/bin/env bash
# Builds an environment that serves a tiny model with a real SGLang on a CPU: install.sh DIR. Python 3.11 or 3.12, x86-64
# Linux, 4 GB of disk. What is there already and as it should be is left alone. Ends with DIR/launch.json.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:?usage: install.sh DIR}
python=${PYTHON:-python3}
mkdir -p "$dir/logs"
dir=$(cd "$dir" && pwd)
log=$dir/install.log
began=$SECONDS

say() { echo "[$((SECONDS - began)) s] $*"; }
fail() { echo "make sglang: $*" >&2; exit 1; }

[ "$(uname -sm)" = "Linux x86_64" ] || fail "this is $(uname -sm): the wheels of SGLang and Mooncake exist for x86-64 Linux"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null ||
    fail "$python is no Python 3.11 or 3.12: set PYTHON=/path/to/python3.11"

# ---- packages: torch first and alone, since sglang's own pins would bring CUDA builds -------------------------------
wanted=$(cat "$here"/requirements*.txt | sha256sum | cut -c1-16)
venv=$dir/venv
runs() { "$venv/bin/python" -c 'import importlib.util as u; assert u.find_spec("sglang") and u.find_spec("torch")' 2>/dev/null; }
if [ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ] || ! runs; then
    left=$(df -Pk "$dir" | awk 'NR == 2 {print int($4 / 1024 / 1024)}')
    [ "$left" -ge 5 ] || fail "$dir has $left GB left and needs 5: set SGLANG_DIR to a folder on a larger disk"
    say "packages into $venv, about 3 GB and some minutes (what pip says: $log)"
    "$venv/bin/python" -c '' 2>/dev/null || "$python" -m venv --clear "$venv"
    pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1; }
    cpu_torch() { "$venv/bin/python" -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != "2.13.0")' 2>/dev/null; }
    say "  torch 2.13.0 …"
    cpu_torch || pip install --no-deps torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu ||
        pip install --no-deps torch==2.13.0 || fail "torch could not be installed: see $log"
    say "  what SGLang needs …"
    pip install --no-deps -r "$here/requirements.txt" || fail "its packages could not be installed: see $log"
    say "  SGLang and Mooncake …"
    pip install --no-deps -r "$here/requirements-engine.txt" || fail "SGLang could not be installed: see $log"
    runs || fail "$venv is broken: remove it and run make sglang again"
    echo "$wanted" >"$venv/installed"
else
    say "packages are there: $venv"
fi

# ---- Debian libraries that Mooncake is linked with --------------------------------------------------------------------
packages="libibverbs1 libnl-3-200 libnl-route-3-200"
libraries=$dir/lib
missing() {
    LD_LIBRARY_PATH=$libraries ldd "$venv"/lib/python3*/site-packages/mooncake/engine*.so 2>/dev/null | grep 'not found' || true
}
if [ -n "$(missing)" ]; then
    say "libraries: $packages"
    if [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; then
        root=$([ "$(id -u)" = 0 ] || echo sudo)
        { $root apt-get update -qq && $root apt-get install -qq -y --no-install-recommends $packages; } >>"$log" 2>&1 || true
    fi
    if [ -n "$(missing)" ]; then # without root: unpacked beside the environment
        mkdir -p "$libraries" "$dir/debs"
        (cd "$dir/debs" && apt-get download $packages >>"$log" 2>&1 && for deb in *.deb; do dpkg -x "$deb" .; done &&
            find . -name '*.so*' -exec cp -P {} "$libraries" \;) >>"$log" 2>&1 || true
    fi
    [ -z "$(missing)" ] || fail "Mooncake lacks $(missing | awk '{print $1}' | xargs): install the packages $packages"
fi

# ---- shim and model ---------------------------------------------------------------------------------------------------
rm -rf "$dir/shim" && cp -r "$here/shim" "$dir/shim"
made=$(cat "$here/make_model.py" "$here/../../engines/emulator/tokenizer/"* | sha256sum | cut -c1-16)
if [ "$(cat "$dir/model/made" 2>/dev/null)" != "$made" ]; then
    say "a tiny model into $dir/model"
    rm -rf "$dir/model"
    PYTHONPATH=$dir/shim PYTHONWARNINGS=ignore "$venv/bin/python" "$here/make_model.py" "$dir/model" >>"$log" 2>&1 ||
        fail "the model could not be made: see $log"
    echo "$made" >"$dir/model/made"
fi

"$venv/bin/python" "$here/write_launch.py" "$dir"
say "ready: pdgate demo --engine sglang --sglang-dir $dir   (or: export PDGATE_SGLANG_DIR=$dir)"
