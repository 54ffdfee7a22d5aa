"""`python -m trinity_core.exchange.tracking.mlflow_server STORE ARTIFACTS`: MLflow's pages and API, behind a `Gate`.

MLflow's own server asks nobody for a key, and keeps and serves an experiment's artifacts in any folder that a request
names. Here they are in the folder ARTIFACTS, no request names a place, and links out of the folder are not followed.
What runs commands or sends requests elsewhere is closed: MLflow's assistant, gateway, jobs and webhooks.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trinity_core.base.addresses import LOOPBACK
from trinity_core.base.files import private_file, private_folder
from trinity_core.base.gate import Gate, asked_for, server_key

if TYPE_CHECKING:
    from mlflow.entities import FileInfo
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

HEALTH = "/health"
CLOSED = re.compile(r"/((ajax-)?api/\d\.\d/)?(mlflow/)?(assistant|gateway|gateway-proxy|jobs|webhooks)(/|$)")
READ_ONLY = ("GET", "HEAD", "OPTIONS")


def make_app(store: str, artifacts: Path) -> Any:
    """Return MLflow's ASGI application for the SQLite store at that URI, to be served behind a `Gate`."""
    import uvicorn  # noqa: F401 - tells MLflow that it is a server
    from mlflow.prompt.constants import _PROMPT_SOURCE_PLACEHOLDERS as PLACEHOLDERS
    from mlflow.server import constants, handlers
    from starlette.responses import PlainTextResponse

    root = private_folder(artifacts.absolute())
    private_file(Path(store.removeprefix("sqlite:///")))
    places = ("runs:/", "models:/", re.escape(f"{root.as_uri()}/"), re.escape(f"{root}/"))
    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: store,
        constants.ARTIFACT_ROOT_ENV_VAR: root.as_uri(),
        "MLFLOW_CREATE_MODEL_VERSION_SOURCE_VALIDATION_REGEX": (
            f"^({'|'.join(places)}|({'|'.join(map(re.escape, sorted(PLACEHOLDERS)))})$)"
        ),
        "MLFLOW_ENABLE_AI_GATEWAY": "false",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    os.environ.pop(constants.SERVE_ARTIFACTS_ENV_VAR, None)  # no uploads to paths of a request's choice
    _keep_artifacts_in(root)
    handlers.initialize_backend_stores(store, store, root.as_uri())
    from mlflow.server.fastapi_app import app

    async def open_parts(scope: Any, receive: Any, send: Any) -> None:
        path, is_read = scope.get("path", ""), scope.get("method") in READ_ONLY
        closed = CLOSED.match(path)
        if closed and (closed[4] == "assistant" or not is_read):
            refusal = PlainTextResponse("this server has closed that part of MLflow\n", 403)
            await refusal(scope, receive, send)
        else:
            await app(scope, receive, send)

    return open_parts


def _keep_artifacts_in(root: Path) -> None:
    """Make this process refuse every other place of artifacts, whoever has named it."""
    from mlflow.exceptions import MlflowException
    from mlflow.server import handlers
    from mlflow.store.artifact import artifact_repository_registry as registry
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from mlflow.tracing.utils.artifact_utils import TRACE_DATA_FILE_NAME
    from mlflow.utils.uri import validate_path_within_directory

    def refuse(uri: str, *_: Any, **__: Any) -> NoReturn:
        raise MlflowException.invalid_parameter_value(f"This server keeps artifacts in {root} only, not in {uri}.")

    def is_inside(folder: Path, path: str) -> bool:
        return Path(path).resolve().is_relative_to(folder.resolve())

    class Repository(LocalArtifactRepository):
        """A folder below the root. MLflow itself follows no link from within it out of it."""

        def __init__(self, artifact_uri: str, *positional: Any, **options: Any) -> None:
            super().__init__(artifact_uri, *positional, **options)
            if not is_inside(root, self.artifact_dir):
                refuse(artifact_uri)

        def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
            folder = Path(self.artifact_dir)
            return [file for file in super().list_artifacts(path) if is_inside(folder, str(folder / file.path))]

        def download_trace_data(self) -> dict[str, Any]:
            validate_path_within_directory(self.artifact_dir, str(Path(self.artifact_dir, TRACE_DATA_FILE_NAME)))
            return super().download_trace_data()

    class Store(SqlAlchemyStore):
        def __init__(self, store_uri: str, artifact_uri: str) -> None:
            super().__init__(store_uri, artifact_uri)

        def create_experiment(self, name: str, artifact_location: str | None = None, tags: Any = None) -> str:
            if artifact_location:
                refuse(artifact_location)
            return str(super().create_experiment(name, None, tags))

    local: dict[str, type[LocalArtifactRepository]] = {"": Repository, "file": Repository}
    for scheme in {*registry.get_registered_artifact_repositories()} - {"runs", "models"}:
        registry._artifact_repository_registry.register(scheme, local.get(scheme, refuse))
    handlers._tracking_store_registry.register("sqlite", Store)


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description="Serve MLflow's pages for a SQLite store, on this machine only.")
    parser.add_argument("store", help="sqlite:////folder/mlflow.db")
    parser.add_argument("artifacts", type=Path, help="the folder of its artifacts")
    parser.add_argument("--port", type=int, default=5000)
    options = parser.parse_args()
    key = server_key()
    print(f"MLflow: http://{LOOPBACK}:{options.port}   ({asked_for(key)})", flush=True)
    app = Gate(make_app(options.store, options.artifacts), key, open_path=HEALTH)
    uvicorn.run(app, host=LOOPBACK, port=options.port, log_level="warning", ws="none")


if __name__ == "__main__":
    main()
