"""The guide's recipe for pgvector, statement by statement, on a real PostgreSQL."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.sources.servers import pgvector  # noqa: F401
from tests.tiny_runs import printed, tiny_run

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "use.md"


def recipe() -> tuple[str, str, list[str]]:
    """The program that writes the CSV file, the command that loads it, and the SQL statements."""
    text = GUIDE.read_text(encoding="utf-8").partition("## Vector search")[2]
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    sql = re.search(r"```sql\n(.*?)```", text, re.DOTALL)
    assert program is not None and sql is not None
    bare = re.sub(r"--.*", "", sql[1])
    loading = re.search(r"^\\copy .*$", bare, re.MULTILINE)
    assert loading is not None
    statements = [part.strip() for part in bare.replace(loading[0], "").split(";") if part.strip()]
    return program[1], loading[0], statements


@pytest.mark.parametrize("model", ["counts", "transformer"])
def test_the_recipe_gives_the_best_inner_products(
    pgvector: str,  # noqa: F811
    model: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dbapi = pytest.importorskip("adbc_driver_postgresql.dbapi", reason="adbc is not installed")
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PGPASSWORD", "hush")
    run = tiny_run(tmp_path_factory, model=model, epsilon=60.0)
    printed("export", run, "--vectors", "items.parquet", *(["--dim", 8] if model == "counts" else []))
    table = pq.read_table("items.parquet").to_pydict()
    vectors = np.array(table["vector"])
    program, loading, statements = recipe()
    assert program.strip() and statements
    subprocess.run([sys.executable, "-c", program], check=True)
    created, indexed = statements[:-2], statements[-2]
    with dbapi.connect(pgvector, autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS items")
        for statement in created:
            cursor.execute(re.sub(r"vector\(\d+\)", f"vector({vectors.shape[1]})", statement))
        _psql(pgvector, loading)
        cursor.execute(indexed)
        cursor.execute("SELECT count(*) FROM items")
        assert cursor.fetchone() == (len(vectors),)
        query = vectors[3] * 2 + vectors[5]
        history = [str(table["item_id"][place]) for place in (3, 5)]
        given = {"$1": f"'{query.tolist()}'", "$2": "'{" + ",".join(f'"{name}"' for name in history) + "}'"}
        best = re.sub(r"\$[12]", lambda found: given[found[0]], statements[-1])
        found = _rows(cursor, best)
    scores = vectors @ query
    order = [place for place in np.argsort(-scores, kind="stable") if str(table["item_id"][place]) not in history][:10]
    assert len(found) == 10
    np.testing.assert_allclose([score for _, score in found], scores[order], rtol=1e-4, atol=1e-5)
    assert {name for name, _ in found} <= {str(name) for name in table["item_id"]} - set(history)


def _rows(cursor: Any, sql: str) -> list[Any]:
    """Of an exact scan: an index may miss some."""
    cursor.execute("SET enable_indexscan = off")
    cursor.execute(sql)
    return list(cursor.fetchall())


def _psql(address: str, command: str) -> None:
    from shutil import which

    program = which("psql") or str(next(Path("/usr/lib/postgresql").glob("*/bin/psql"), "psql"))
    subprocess.run([program, address, "-c", command], check=True, capture_output=True)
