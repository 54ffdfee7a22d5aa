"""Starts and ends a Data-Juicer server of the run's own."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from trinity_core.addresses import API_KEY, BASE_URL, LOOPBACK
from trinity_core.config import Config
from trinity_core.config.paths import api_address_file
from trinity_core.config.schema.monitor import DataJuicerConfig
from trinity_core.errors import TransientFault, TrinityError
from trinity_core.files import read_json
from trinity_core.pipelines.data_juicer import server_process
from trinity_core.pipelines.data_juicer.client import DataJuicer, Row, Step
from trinity_core.waits import is_readable

log = logging.getLogger(__name__)

STARTS = 3
"""Times that a server is started for one call; one that dies loses nothing, as the rows are still here."""
START_SECONDS = 60.0
"""For a server to listen; it loads Data-Juicer with the first rows."""
END_SECONDS = 5.0
"""For a server to end after its standard input."""
ENVIRONMENT = Path(sys.prefix).with_name(".venv-data-juicer")
MISSING = "Data-Juicer is not installed here: run requirements/data-juicer.sh"


def require_installed() -> Path:
    """The Python that has Data-Juicer. Raises TrinityError, which says how to install it."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        raise TrinityError(MISSING)
    return python


@dataclass
class LocalDataJuicer:
    """A server that is started with the first rows, again if it dies, and ended by `close` or with this process."""

    port: int = 0
    api_address: Path | None = None
    """The file with address and key of the run's OpenAI API, whose models its operators may ask; None for no API."""
    _process: subprocess.Popen[str] | None = None
    _client: DataJuicer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def process(self, rows: Sequence[Row], steps: Sequence[Step]) -> list[Row]:
        """See `Processes`. Raises TrinityError where an operator fails, TransientFault if the server dies each time."""
        with self._lock:
            for attempt in range(1, STARTS + 1):
                client = self._running()
                try:
                    return client.process(rows, steps)
                except TransientFault:
                    self.close()
                    if attempt == STARTS:
                        raise
                    log.warning("the Data-Juicer server has ended; it is started again", exc_info=True)
        raise AssertionError("one of the attempts returns or raises")

    def close(self) -> None:
        """End the server."""
        process, self._process, self._client = self._process, None, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        with suppress(ProcessLookupError):  # processes of its group that are left, or it itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_SECONDS)

    def _endpoint(self) -> dict[str, str]:
        """Variables by which operators that ask a model find those of the run, unless the user names an endpoint."""
        told = read_json(self.api_address) if self.api_address and BASE_URL not in os.environ else None
        return {BASE_URL: told["base_url"], API_KEY: told["api_key"]} if told else {}

    def _running(self) -> DataJuicer:
        if self._client is not None and self._process is not None and self._process.poll() is None:
            return self._client
        self.close()
        key = secrets.token_urlsafe(24)
        command = [str(require_installed()), str(Path(server_process.__file__)), "--port", str(self.port)]
        environment = os.environ | server_process.NO_DOWNLOADS | self._endpoint() | {server_process.KEY: key}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, process_group=0
        )
        out = self._process.stdout
        assert out is not None
        port = out.readline().strip() if is_readable(out.fileno(), START_SECONDS) else ""
        if not port:
            self.close()
            raise TrinityError(f"the Data-Juicer server does not start on port {self.port} (is the port in use?)")
        self._client = DataJuicer(f"http://{LOOPBACK}:{port}", key)
        return self._client


def open_data_juicer(config: Config, serves_models: bool = False) -> DataJuicer | LocalDataJuicer | None:
    """The Data-Juicer of a run: `server_url`, unless `auto_start`; None without `service.data_juicer`.

    `serves_models`: an explorer serves the run's models meanwhile, as far as they have `enable_openai_api`.
    """
    given = config.service.data_juicer
    if given is None:
        return None
    if starts_own(given):
        served = any(model.enable_openai_api for model in config.explorer.auxiliary_models)
        return LocalDataJuicer(given.port, api_address_file(config) if serves_models and served else None)
    return DataJuicer(str(given.server_url), os.environ.get(server_process.KEY, ""))


@contextmanager
def closing_data_juicer(config: Config) -> Iterator[DataJuicer | LocalDataJuicer | None]:
    """`open_data_juicer`; a server of the run's own ends with this context."""
    opened = open_data_juicer(config)
    try:
        yield opened
    finally:
        if isinstance(opened, LocalDataJuicer):
            opened.close()


def starts_own(given: DataJuicerConfig) -> bool:
    """Whether the run starts a server rather than asking one that runs already."""
    return given.auto_start or not given.server_url
