#!/usr/bin/env bash
# Makes .venv-data-juicer: Data-Juicer, in the versions of dill and multiprocess that it asks for, on top of .venv.
# Usage: requirements/data-juicer.sh   (about 50 MB; running it again does nothing until a pin changes)
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv/bin/uv ] || requirements/install.sh
folder=.venv-data-juicer
stamp=$folder/.installed
digest=$(cat requirements/data-juicer.txt requirements/data-juicer.sh | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$digest" ] && exit 0

.venv/bin/python -m venv --clear --without-pip "$folder"
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$packages" >"$("$folder/bin/python" -c "$packages")/beneath.pth"
echo "install: pinned packages from requirements/data-juicer.txt into $folder"
.venv/bin/uv pip install -q --python "$folder/bin/python" --no-deps --compile-bytecode -r requirements/data-juicer.txt
echo "$digest" >"$stamp"
