"""Data-Juicer behind HTTP on the loopback interface: in its own environment, importing nothing from this project.

`POST /process` takes `{"rows": [...], "process": [{operator: args}, ...]}` and answers `{"rows": [...]}`, or `{"error":
...}` with status 400 if the operators cannot be created and 500 if one fails; `GET /` returns the version. With the
environment variable `KEY`, each request must carry that key, because some of Data-Juicer's operators run code. The
server writes its port to standard output once it listens. It has a single thread, because Data-Juicer forks.
"""

from __future__ import annotations

import argparse
import difflib
import hmac
import importlib.metadata
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

KEY = "TRINITY_DATA_JUICER_KEY"
STATISTICS = "__dj__stats__"
NO_DOWNLOADS = {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}
"""Stops Data-Juicer from installing an operator's missing packages, in any version, at run time; it reports them
instead."""


class OperatorError(Exception):
    """An operator fails on the rows."""


def process(rows: list[dict[str, Any]], operators: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Apply the operators to the rows. Raises ValueError for operators that cannot be created, OperatorError."""
    from data_juicer.core.data import NestedDataset
    from data_juicer.ops import OPERATORS, load_ops

    unknown = [name for step in operators for name in step if name not in OPERATORS.modules]
    if unknown:
        near = difflib.get_close_matches(unknown[0], OPERATORS.modules, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"Data-Juicer has no operator {', '.join(unknown)}{hint}")
    try:
        loaded = load_ops([{name: {"num_proc": 1, **args} for name, args in step.items()} for step in operators])
    except (TypeError, ValueError, ImportError) as error:
        raise ValueError(f"Data-Juicer cannot make the operators: {error}") from error
    try:
        dataset = NestedDataset.from_list(rows)
    except (TypeError, ValueError, OverflowError) as error:  # Arrow's errors are one of them
        raise ValueError(f"Data-Juicer cannot take the rows: {error}") from error
    measures: dict[str, set[str]] = {}
    for operator, name in zip(loaded, (name for step in operators for name in step), strict=True):
        if measures.get(name):
            dataset = NestedDataset.from_list(_unmeasured(list(dataset), measures[name]))
        before = _measured(dataset)
        try:
            dataset = dataset.process([operator], open_monitor=False) if len(dataset) else dataset
        except Exception as error:
            raise OperatorError(f"{name}: {type(error).__name__}: {error}") from error
        measures[name] = _measured(dataset) - before
    return list(dataset)


def _measured(dataset: Any) -> set[str]:
    rows = dataset[STATISTICS] if STATISTICS in dataset.features else ()
    return {name for statistics in rows for name in statistics}


def _unmeasured(rows: list[dict[str, Any]], names: set[str]) -> list[dict[str, Any]]:
    """Return the rows without these statistics: a filter that finds its own does not look at the text, which may be
    another column's now, or changed."""
    kept = [{name: value for name, value in row.pop(STATISTICS).items() if name not in names} for row in rows]
    return [row | {STATISTICS: left} if left else row for row, left in zip(rows, kept, strict=True)]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self._is_allowed():
            self._answer(200, {"version": importlib.metadata.version("py-data-juicer")})

    def do_POST(self) -> None:
        if not self._is_allowed():
            return
        try:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(200, {"rows": process(asked["rows"], asked["process"])})
        except ValueError as error:
            self._answer(400, {"error": str(error)})
        except OperatorError as error:
            self._answer(500, {"error": str(error)})

    def _is_allowed(self) -> bool:
        key = os.environ.get(KEY, "")
        header = self.headers.get("Authorization", "")
        if key and not hmac.compare_digest(header.encode(), f"Bearer {key}".encode()):
            self._answer(401, {"error": "the key is wrong"})
            return False
        return True

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content, default=str).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Disable the log; Data-Juicer's own is enough."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=5005, help="0: any free one")
    port = parser.parse_args().port
    os.environ.update(NO_DOWNLOADS)
    server = HTTPServer(("127.0.0.1", port), Handler)
    print(server.server_address[1], flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of operators is not read
    server.serve_forever()


if __name__ == "__main__":
    main()
