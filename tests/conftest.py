"""Fixtures that every test may ask for. A server that cannot be had fails the run."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.faces import FACES, Face
from tests.support.savers import Where


def pytest_configure(config: pytest.Config) -> None:
    """Own this run's servers, unless this process is a worker of a run that does."""
    if servers.RUN_DIRECTORY in os.environ:
        return
    directory = servers.create_run_directory()
    config.add_cleanup(lambda: servers.stop_servers(directory))
    if threading.current_thread() is threading.main_thread():
        # A terminated run ends like an interrupted one, so that its servers end too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgres_server() -> str:
    """The URL of a Postgres server's maintenance database."""
    return servers.postgres_server()


@pytest.fixture(scope="session")
def postgres_template(postgres_server: str) -> Iterator[str]:
    """The name of a database with the saver's tables and no rows."""
    with servers.postgres_template(postgres_server) as name:
        yield name


@pytest.fixture(scope="session")
def postgres_url(postgres_server: str, postgres_template: str) -> Iterator[str]:
    """The URL of this worker's database; threads of other tests are in it too."""
    with servers.database(postgres_server, postgres_template) as url:
        yield url


@pytest.fixture
def empty_postgres_url(postgres_server: str, postgres_template: str) -> Iterator[str]:
    """The URL of a database of this test's own."""
    with servers.database(postgres_server, postgres_template) as url:
        yield url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The URL of a real Redis server."""
    with servers.redis_server() as url:
        yield url


@pytest.fixture
def where(tmp_path: Path, request: pytest.FixtureRequest) -> Where:
    """Where savers keep their rows; Postgres starts when it is first needed."""
    return Where(tmp_path, lambda: str(request.getfixturevalue("postgres_url")))


@pytest.fixture
def empty_where(tmp_path: Path, request: pytest.FixtureRequest) -> Where:
    """Like ``where``, with a Postgres database that holds no other test's threads."""
    return Where(tmp_path, lambda: str(request.getfixturevalue("empty_postgres_url")))


@pytest.fixture
def thread_id() -> str:
    """A thread that no other test uses."""
    return str(uuid.uuid4())


@pytest.fixture(params=FACES, ids=str)
def face(request: pytest.FixtureRequest) -> Face:
    """Each face in turn."""
    assert isinstance(request.param, Face)
    return request.param
