"""The databases that can hold an experience store: scheme of the URL, and the class that opens it.

The classes are in `trinity_core.store` and are imported when a run opens its store, so that this table is as light as
the rest of the configuration.
"""

from __future__ import annotations

STORE_BACKENDS: dict[str, str] = {
    "sqlite": "trinity_core.store.sqlite:SQLite",
    "postgresql": "trinity_core.store.postgresql:PostgreSQL",
}
"""Scheme (without a driver, as in `postgresql+psycopg`) → `module:class` of its `store.backend.StoreBackend`."""
