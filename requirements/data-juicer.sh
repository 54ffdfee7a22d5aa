#!/usr/bin/env bash
# Makes .venv-data-juicer: Data-Juicer, in the versions of dill and multiprocess that it asks for, on top of .venv.
# Usage: requirements/data-juicer.sh [ENVIRONMENT]
#   ENVIRONMENT   the one that Trinity Flows is installed in, by default .venv; Data-Juicer's lies beside it
# About 50 MB; running it again does nothing until a pin changes.
set -euo pipefail
cd "$(dirname "$0")/.."

base=${1:-.venv}
[ -x "$base/bin/uv" ] || [ -n "${1:-}" ] || requirements/install.sh
folder="$("$base/bin/python" -c 'import sys; print(sys.prefix)')-data-juicer"
stamp=$folder/.installed
digest=$(cat requirements/data-juicer.txt requirements/data-juicer.sh | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$digest" ] && exit 0

"$base/bin/python" -m venv --clear --without-pip "$folder"
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
"$base/bin/python" -c "$packages" >"$("$folder/bin/python" -c "$packages")/beneath.pth"
echo "install: pinned packages from requirements/data-juicer.txt into $folder"
"$base/bin/uv" pip install -q --python "$folder/bin/python" --no-deps --compile-bytecode -r requirements/data-juicer.txt
echo "$digest" >"$stamp"
