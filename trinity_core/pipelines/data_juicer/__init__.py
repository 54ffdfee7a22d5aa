"""Data-Juicer, in its own process and environment: its operators on rows and on experiences."""

from trinity_core.pipelines.data_juicer.client import DataJuicer, process_rows
from trinity_core.pipelines.data_juicer.local import LocalDataJuicer, open_data_juicer

__all__ = ["DataJuicer", "LocalDataJuicer", "open_data_juicer", "process_rows"]
