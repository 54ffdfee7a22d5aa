"""Starts and ends the run's own Data-Juicer server."""

from __future__ import annotations

import logging
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from trinity_core.base.addresses import API_KEY, BASE_URL, LOOPBACK
from trinity_core.base.children import Child
from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.files import read_json
from trinity_core.base.waits import is_readable
from trinity_core.config import Config
from trinity_core.config.paths import api_address_file
from trinity_core.config.schema.monitor import DataJuicerConfig
from trinity_core.pipelines.data_juicer import server_process
from trinity_core.pipelines.data_juicer.client import DataJuicer, Row, Step

log = logging.getLogger(__name__)

STARTS = 3
"""Maximum number of server starts per call; a dying server loses nothing, because the rows are still here."""
START_SECONDS = 60.0
"""Time for a server to listen; it loads Data-Juicer with the first rows."""
ENVIRONMENT = Path(f"{sys.prefix}-data-juicer")
MISSING = f"Data-Juicer is not installed here: run requirements/data-juicer.sh {sys.prefix}"


def require_installed() -> Path:
    """Return the Python that has Data-Juicer. Raises TrinityError with installation instructions."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        raise TrinityError(MISSING)
    return python


@dataclass
class LocalDataJuicer:
    """A server that starts with the first rows, restarts if it dies, and ends with `close` or with this process."""

    port: int = 0
    api_address: Path | None = None
    """File with address and key of the run's OpenAI API, whose models its operators may call; None without an API."""
    _child: Child | None = None
    _client: DataJuicer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def process(self, rows: Sequence[Row], steps: Sequence[Step]) -> list[Row]:
        """See `Processes`. Raises TrinityError if an operator fails, TransientFault if the server dies each time."""
        with self._lock:
            for attempt in range(1, STARTS + 1):
                client = self._running()
                try:
                    return client.process(rows, steps)
                except TransientFault:
                    self.close()
                    if attempt == STARTS:
                        raise
                    log.warning("the Data-Juicer server has ended and is restarted", exc_info=True)
        raise AssertionError("one of the attempts returns or raises")

    def close(self) -> None:
        child, self._child, self._client = self._child, None, None
        if child is not None:
            child.kill()

    def _endpoint(self) -> dict[str, str]:
        """Return variables by which operators that call a model find the run's, unless the user names an endpoint."""
        api = read_json(self.api_address) if self.api_address and BASE_URL not in os.environ else {}
        return {BASE_URL: api["base_url"], API_KEY: api["api_key"]} if api else {}

    def _running(self) -> DataJuicer:
        if self._client is not None and self._child is not None and self._child.alive:
            return self._client
        self.close()
        key = secrets.token_urlsafe(24)
        command = [str(require_installed()), server_process.__file__, "--port", str(self.port)]
        environment = os.environ | server_process.NO_DOWNLOADS | self._endpoint() | {server_process.KEY: key}
        self._child = Child(command, environment=environment, stdout=subprocess.PIPE)
        out = self._child.process.stdout
        assert out is not None
        with out:
            port = int(out.readline() or 0) if is_readable(out.fileno(), START_SECONDS) else 0
        if not port:
            self.close()
            raise TrinityError(f"the Data-Juicer server does not start on port {self.port} (is the port in use?)")
        self._client = DataJuicer(f"http://{LOOPBACK}:{port}", key)
        return self._client


def open_data_juicer(config: Config, serves_models: bool = False) -> DataJuicer | LocalDataJuicer | None:
    """Return the run's Data-Juicer: `server_url`, unless `auto_start`; None without `service.data_juicer`.

    `serves_models`: an explorer serves the run's models meanwhile, if they have `enable_openai_api`.
    """
    service = config.service.data_juicer
    if service is None:
        return None
    if starts_own(service):
        served = any(model.enable_openai_api for model in config.explorer.auxiliary_models)
        return LocalDataJuicer(service.port, api_address_file(config) if serves_models and served else None)
    return DataJuicer(str(service.server_url), os.environ.get(server_process.KEY, ""))


@contextmanager
def closing_data_juicer(config: Config) -> Iterator[DataJuicer | LocalDataJuicer | None]:
    """Open the run's Data-Juicer; the run's own server ends with this context."""
    opened = open_data_juicer(config)
    try:
        yield opened
    finally:
        if isinstance(opened, LocalDataJuicer):
            opened.close()


def starts_own(service: DataJuicerConfig) -> bool:
    """True if the run starts a server instead of using a running one."""
    return service.auto_start or not service.server_url


SOURCES = "lib/python3*/site-packages/data_juicer/ops/**/*.py"
CONSTANT = re.compile(r"""^(\w*NAME) = ["'](\w+)["']""", re.MULTILINE)
REGISTERED = re.compile(r'^@OPERATORS\.register_module\((?:f?"([\w{}]+)"|(\w+))\)', re.MULTILINE)
"""A name, possibly with constants in braces, or a constant."""


@cache
def installed_operators() -> frozenset[str]:
    """Return the names of the operators. Raises TrinityError if Data-Juicer is not installed."""
    environment = require_installed().parent.parent
    return frozenset(name for path in environment.glob(SOURCES) for name in _registered(path))


def _registered(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    constants = dict(CONSTANT.findall(text))
    for name, constant in REGISTERED.findall(text):
        yield name.format(**constants) if name else constants[constant]
