"""The newest metrics of a run for Prometheus: `http://127.0.0.1:<monitor.prometheus_port>/metrics`.

The flow process serves them while it tracks the run. Prometheus pulls them; nothing is pushed.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable

from trinity_core.base.addresses import LOOPBACK
from trinity_core.exchange.tracking.metrics_file import MetricLine
from trinity_core.exchange.tracking.writers import full_names

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0


def prometheus_name(name: str) -> str:
    """Convert a metric's name for Prometheus: `timing_s/step` becomes `trinity_timing_s_step`."""
    return "trinity_" + re.sub(r"\W", "_", name, flags=re.ASCII)


class PrometheusPage:
    """Serves gauges with the labels `project` and `run`; metrics whose converted names collide share a gauge.

    If the port is taken, it logs a warning and serves nothing: training does not depend on it.
    """

    def __init__(self, port: int, project: str, run: str) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._gauge = Gauge
        self._registry = CollectorRegistry()
        self._labels = {"project": project, "run": run}
        self._gauges: dict[str, Gauge] = {}
        self._server = self._thread = None
        try:
            self._server, self._thread = start_http_server(port, LOOPBACK, self._registry)
        except OSError as error:
            log.warning("monitor.prometheus_port %d: no metrics are served for Prometheus (%s)", port, error)

    def show(self, lines: Iterable[MetricLine]) -> None:
        """Set the gauges to the values of these lines, and `trinity_step` of each source to its step."""
        for line in lines:
            source = prometheus_name(f"{line.source}/step")
            self._set(source, f"the newest step of {line.source}", line.step)
            for name, value in full_names(line).items():
                if math.isfinite(value):
                    self._set(prometheus_name(name), name, value)

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(STOP_SECONDS)

    def _set(self, name: str, doc: str, value: float) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._gauge(name, doc, list(self._labels), registry=self._registry)
        self._gauges[name].labels(**self._labels).set(value)
