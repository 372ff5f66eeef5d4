"""Valid files of every kind: what mutations start from."""

import json
import tempfile
from functools import cache
from pathlib import Path

from dpformer.accounting import Gaussian, Ledger, PoissonGaussian
from dpformer.noise import BandedGaussian
from dpformer.runs.config import Config

USERS, ITEMS = 12, 6
ROWS = [(f"u{u}", f"i{(u + t) % ITEMS}", 1.5 + t, 10 * t) for u in range(USERS) for t in range(3 + u % 3)]


def table(separator: str, header: str = "") -> bytes:
    return (header + "\n".join(separator.join(map(str, row)) for row in ROWS) + "\n").encode()


def json_lines(*names: str) -> bytes:
    return "".join(json.dumps(dict(zip(names, row, strict=False))) + "\n" for row in ROWS).encode()


def catalog() -> list[bytes]:
    titled = "".join(f"i{item},Title {item}\n" for item in range(ITEMS))
    lines = "".join(json.dumps({"item_id": f"i{item}", "title": f"é {item}"}) + "\n" for item in range(ITEMS))
    return [f"item_id,title\n{titled}".encode(), lines.encode(), b"".join(b"i%d\n" % item for item in range(ITEMS))]


def texts() -> bytes:
    return "".join(
        json.dumps({"author": f"a{n % 23}", "id": n, "text": f"Line {n}.\nAnother é {n}."}) + "\n" for n in range(30)
    ).encode()


def histories() -> bytes:
    return b'{"user_id": "u1", "history": ["i1", "i2"]}\n["i3", "i4"]\n{"history": []}\n'


def tokenizer() -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, " ": 3}, [("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return str(made.to_str()).encode()


def ledger() -> bytes:
    training = PoissonGaussian(1.5, 0.1, 20, label="training"), BandedGaussian(1.5, 0.1, 20, 3, label="correlated")
    return Ledger([Gaussian(8.0, label="frequencies"), *training]).to_json().encode()


def config() -> bytes:
    return Config.make(model="transformer", dim=8, epochs=1).resolve(users=USERS, threads=1).to_toml().encode()


def parquet() -> bytes:
    import duckdb

    with tempfile.TemporaryDirectory() as folder, duckdb.connect() as connection:
        path = Path(folder) / "log.parquet"
        values = ", ".join(f"('{u}', '{i}', {t})" for u, i, _, t in ROWS)
        query = f"SELECT * FROM (VALUES {values}) AS log(user_id, item_id, timestamp)"
        connection.execute(f"COPY ({query}) TO '{path}' (FORMAT parquet)")
        return path.read_bytes()


@cache
def run(model: str) -> Path:
    """A small finished run; it goes with the process."""
    import atexit
    import shutil

    from dpformer.runs import train

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    log = folder / "log.csv"
    log.write_bytes(table(",", "user_id,item_id,rating,timestamp\n"))
    small = {"dim": 4, "blocks": 1, "epochs": 1} if model == "transformer" else {}
    choices = {"max_length": 4, "threads": 1, "epsilon": 8.0, "private_metrics": True, **small}
    choices["assume_items_public"] = True  # of so few users no list of items could be released
    train(Config.make(file=log, model=model, **choices), folder / "run")
    return folder / "run"


def model(name: str) -> bytes:
    return (run(name) / "model.safetensors").read_bytes()


def statement(name: str) -> bytes:
    return (run(name) / "privacy.json").read_bytes()


def releases() -> bytes:
    return (run("counts") / "releases.safetensors").read_bytes()


def budget() -> bytes:
    from dpformer.accounting.events import Gaussian
    from dpformer.runs import ledger_file

    with tempfile.TemporaryDirectory() as folder:
        ledger_file.create(Path(folder) / "budget.db", 9.0, 1e-6)
        ledger_file.reserve(Path(folder) / "budget.db", "run", [Gaussian(3.0, label="items", delta=1e-7)])
        return (Path(folder) / "budget.db").read_bytes()


def metrics() -> bytes:
    return (run("transformer") / "metrics.jsonl").read_bytes()


def checkpoint() -> bytes:
    import torch

    from dpformer.runs.checkpoint import save_checkpoint

    state = {
        "step": 3,
        "keys": [b"\0" * 32],
        "model": {"w": torch.ones(2, 3)},
        "pair": (1.5, None),
        "numbers": {1: "a"},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        save_checkpoint(path, state, config="c", data="d")
        return path.read_bytes()


def checkpoint_body() -> bytes:
    from safetensors import safe_open

    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(checkpoint())
        with safe_open(file.name, framework="pt") as opened:
            return str(json.loads(opened.metadata()["dpformer-checkpoint"])["body"]).encode()


def model_header(name: str) -> bytes:
    from safetensors import safe_open

    with safe_open(run(name) / "model.safetensors", framework="pt") as opened:
        return str(opened.metadata()["dpformer"]).encode()
