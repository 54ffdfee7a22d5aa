"""Fresh stores for tests, on SQLite and on a real PostgreSQL server."""

from collections.abc import Callable

import pytest

from trinity_core.exchange.store.store import ExperienceStore


@pytest.fixture(params=["sqlite", "postgresql"])
def server_url(request):
    """The URL of the PostgreSQL server that tests share; "" where the store is to be a SQLite file."""
    return request.getfixturevalue("postgresql_url") if request.param == "postgresql" else ""


@pytest.fixture
def open_store(server_url, tmp_path) -> Callable[..., ExperienceStore]:
    """Opens the test's store, or that of another `run` in the same database, as one more process would."""
    url = server_url or f"sqlite:///{tmp_path}/buffer/store.db"
    return lambda run="": ExperienceStore.open(url, f"{tmp_path}/{run}")


@pytest.fixture
def store(open_store):
    with open_store() as opened:
        yield opened
