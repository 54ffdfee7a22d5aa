#!/usr/bin/env bash
# Makes .venv with the pinned packages: requirements/gpu.txt where there is an NVIDIA GPU, else requirements/cpu.txt.
# Usage: requirements/install.sh [dev]   (dev adds the tools for tests, lint and types, and what tests of agents and environments need)
# Needs only a Python 3.11 with venv and pip, and a package index; for a GPU also what docs/install.md lists. Running it again does nothing until a pin changes.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { printf 'install: %s\n' "$*" >&2; exit 1; }

find_python() {
    for candidate in "${PYTHON:-}" python3.11 python3 python; do
        [ -n "$candidate" ] || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && { echo "$candidate"; return; }
    done
    die "no Python 3.11 found; install it, or say where it is: PYTHON=/path/to/python3.11 make install"
}

kind=cpu
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then kind=gpu; fi
files=(requirements/$kind.txt)
if [ $kind = gpu ]; then  # before 4 GB are downloaded
    cuda=$(nvidia-smi | sed -n 's/.*CUDA[A-Za-z ]* Version: *\([0-9]*\).*/\1/p' | head -n 1)
    [ "${cuda:-13}" -ge 13 ] || die "the NVIDIA driver runs CUDA $cuda, and requirements/gpu.txt needs CUDA 13: install driver 580 or newer"
    command -v "${CC:-gcc}" >/dev/null || command -v clang >/dev/null || echo "install: kernels on GPUs need a C compiler when they first run; install gcc (Debian's build-essential)" >&2
    "$(find_python)" -c 'import os, sysconfig as s; os.stat(s.get_paths()["include"] + "/Python.h")' 2>/dev/null || echo "install: kernels on GPUs need Python.h when they first run; install Python's headers (Debian's python3-dev)" >&2
fi
optional=
[ "${1:-}" = dev ] && files+=(requirements/dev.txt requirements/agents.txt requirements/openenv.txt) && optional=requirements/environments.txt

stamp=".venv/.installed-${1:-run}"
digest=$(cat "${files[@]}" ${optional:+"$optional"} pyproject.toml requirements/install.sh requirements/compile.py | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$digest" ] && exit 0

# An environment without pip is one that was cut short, or whose Python has gone.
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$(find_python)" -m venv --clear .venv
.venv/bin/python -m pip install -q --disable-pip-version-check "$(grep '^uv==' requirements/cpu.txt)"

# PyTorch's builds without CUDA are not on the main index. A folder of wheels that pip is configured with is asked
# first; otherwise uv takes them from PyTorch's own index.
options=(--no-deps -q)
links="${PIP_FIND_LINKS:-$(.venv/bin/python -m pip config get global.find-links 2>/dev/null || true)}"
if [ -n "$links" ]; then
    for link in $links; do options+=(--find-links "$link"); done
elif [ $kind = cpu ]; then
    options+=(--torch-backend cpu)
fi
requirements=()
for file in "${files[@]}"; do requirements+=(-r "$file"); done

echo "install: pinned packages from ${files[*]} into .venv (about 4 GB)"
.venv/bin/uv pip install --python .venv/bin/python "${options[@]}" "${requirements[@]}" || die "the packages above could not be installed"
if [ -n "$optional" ]; then  # pycosat, which reasoning-gym needs, is built here; a machine may have no C compiler
    .venv/bin/uv pip install --python .venv/bin/python "${options[@]}" -r "$optional" || {
        grep -v '^pycosat' "$optional" >.venv/without-pycosat.txt
        .venv/bin/uv pip install --python .venv/bin/python "${options[@]}" -r .venv/without-pycosat.txt || die "the packages of $optional could not be installed"
        echo "install: without pycosat, for which there is no C compiler; tests of reasoning-gym will be skipped" >&2
    }
fi
.venv/bin/uv pip install --python .venv/bin/python -q --no-deps --no-build-isolation -e . || die "the project itself could not be installed"
# Compiled once here: elsewhere Python does it at the first import, and at every one where it may write no bytecode.
.venv/bin/python requirements/compile.py || die "the installed packages could not be compiled"
.venv/bin/python -c 'import torch' 2>/dev/null || die "torch $(grep '^torch==' requirements/$kind.txt) does not import: on a machine without a GPU it has to be the CPU build; put its wheel in a folder and run PIP_FIND_LINKS=that/folder make install"
echo "$digest" >"$stamp"
