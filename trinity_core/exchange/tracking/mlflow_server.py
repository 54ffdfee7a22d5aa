"""`python -m trinity_core.exchange.tracking.mlflow_server STORE ARTIFACTS`: MLflow's pages and API, behind a `Gate`.

MLflow's own server asks nobody for a key, and a page of another site could use it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from trinity_core.base.addresses import LOOPBACK
from trinity_core.base.files import private_folder
from trinity_core.base.gate import Gate, asked_for, server_key
from trinity_core.base.runlock import one_at_a_time
from trinity_core.exchange.tracking.mlflow_root import LOCK, LOCK_SECONDS, make_database, newest_charts

HEALTH = "/health"
RUNS = "/runs"
"""Path that leads to the charts of the newest runs."""
OPENING = """<!doctype html><title>MLflow</title><script>
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true")
location.replace({page})
</script>"""
"""The page at `RUNS`. MLflow opens its assistant, which needs a model of its own, over a third of the first page that a
browser shows; the note in the browser's storage is how MLflow knows that it has done so."""


def make_app(store: str, artifacts: Path) -> Any:
    """Return MLflow's ASGI application for the SQLite store at that URI, to be served behind a `Gate`."""
    import uvicorn  # noqa: F401 - tells MLflow that it is a server
    from mlflow.server import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR, handlers

    root = private_folder(artifacts.absolute()).as_uri()
    with one_at_a_time(artifacts.absolute().parent / LOCK, LOCK_SECONDS):
        make_database(Path(store.removeprefix("sqlite:///")))
    os.environ |= {BACKEND_STORE_URI_ENV_VAR: store, ARTIFACT_ROOT_ENV_VAR: root}
    handlers.initialize_backend_stores(store, store, root)
    from mlflow.server.fastapi_app import app
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    def open_runs(_request: Any) -> HTMLResponse:
        return HTMLResponse(OPENING.format(page=json.dumps(newest_charts(artifacts.absolute().parent))))

    app.router.routes.insert(0, Route(RUNS, open_runs))  # before MLflow's own, which take every path
    return app


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description="Serve MLflow's pages for a SQLite store, on this machine only.")
    parser.add_argument("store", help="sqlite:////folder/mlflow.db")
    parser.add_argument("artifacts", type=Path, help="the folder of its artifacts")
    parser.add_argument("--port", type=int, default=5000)
    options = parser.parse_args()
    key = server_key()
    print(f"MLflow: http://{LOOPBACK}:{options.port}{RUNS}   ({asked_for(key)})", flush=True)
    app = Gate(make_app(options.store, options.artifacts), key, open_paths=[HEALTH])
    uvicorn.run(app, host=LOOPBACK, port=options.port, log_level="warning", ws="none")


if __name__ == "__main__":
    main()
