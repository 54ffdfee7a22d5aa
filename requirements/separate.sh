#!/usr/bin/env bash
# Makes .venv-NAME from requirements/NAME.txt beside .venv: other people's libraries, which tests drive from outside.
# Usage: requirements/separate.sh NAME…
# Running it again does nothing until a pin changes.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=
for name in "$@"; do
    pins=requirements/$name.txt stamp=.venv-$name/.installed
    cmp -s "$pins" "$stamp" && continue
    echo "install: pinned packages from $pins into .venv-$name"
    .venv/bin/uv venv -q --clear --python .venv/bin/python ".venv-$name"
    if .venv/bin/uv pip install -q --python ".venv-$name/bin/python" --no-deps -r "$pins"; then
        cp "$pins" "$stamp"
    else
        rm -rf ".venv-$name"
        missing+=" $name"
    fi
done
[ -z "$missing" ] || { echo "install: without$missing" >&2; exit 1; }
