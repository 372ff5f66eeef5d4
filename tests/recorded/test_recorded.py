"""Loss curves and released numbers of seeded runs, as they were recorded: a redesign changes none of them.

    python -m tests.recorded.test_recorded      records them anew on this processor; a commit that changes a record
                                                says why, and deletes those of other processors

Bits depend on the processor (which kernels torch takes, and which of ours there are), so there is one record for each
kind of arithmetic; on one that nobody has recorded the tests skip. The hash of the config is held fixed: it addresses
the noise, and a new option would change it.
"""

import hashlib
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.sparse import random as sparse_random
from scipy.sparse.linalg import eigsh

from dpformer.kernels.products import products
from dpformer.runs import Config, train

RECORD = Path(__file__).with_name("record.json")
SMALL = {"seed": 3, "dim": 16, "epochs": 1, "batch_size": 700, "threads": 1, "max_length": 12, "epsilon": 8.0}
TEXT = "To be, or not to be, that is the question.\nWhether 'tis nobler in the mind to suffer\n" * 40
CASES: dict[str, dict[str, Any]] = {
    "counts": {"model": "counts", "seed": 3, "threads": 1, "epsilon": 8.0},
    "vanilla": {**SMALL, "model": "transformer", "reattention": False},
    "re-attention": {**SMALL, "model": "transformer", "reattention": True},
    "gru": {**SMALL, "model": "gru"},
    "not shared": {**SMALL, "model": "transformer", "reattention": False, "shared": False, "clipping": "clip"},
    "correlated noise": {**SMALL, "model": "transformer", "reattention": False, "bands": 3},
    "started from counts": {**SMALL, "model": "transformer", "warm_start": 0.5, "private_metrics": True},
    "text": {**SMALL, "task": "lm", "unit": "chunk", "batch_size": 20},
}


@cache
def arithmetic() -> str:
    """Tells processors apart whose kernels round differently, in any of the functions that a run is made of."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 64, generator=generator)
    parts = [x @ x.T, x.exp().sum(0), torch.layer_norm(x, (64,)), torch.nn.functional.gelu(x).cumsum(0)]
    long = torch.randn(8400, 16, generator=generator)  # sums over many users, which are cut into parts
    parts += [long.T @ long, long.double().T @ long.double(), long.T @ long[:, :3], long.sum(0), long.square().mean()]
    rows = torch.randint(0, 400, (8400,), generator=generator)
    parts += [torch.zeros(400, 16).index_add_(0, rows, long), (long @ x[:, :16].T).log_softmax(1).sum(0)]
    wide = long.double().abs()
    parts += [wide.log(), wide.sqrt(), wide.sin(), wide.cos(), torch.linalg.eigh(x.T @ x)[0], *_of_layers(long)]
    numbers = wide.numpy()
    parts += [torch.from_numpy(f(numbers)) for f in (np.log, np.exp, np.sin, np.cos)]
    parts += [torch.from_numpy(f(numbers.astype(np.float32))) for f in (np.log, np.exp, np.sin, np.cos)]
    parts += [part for part in products(long.view(700, 12, 16), long.view(700, 12, 16)) if part is not None]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:16]


@cache
def factoring() -> str:
    """The same for SciPy's eigenvectors and NumPy's QR, from which a warm start is made: their BLAS is their own."""
    generator = np.random.default_rng(0)
    matrix = sparse_random(300, 300, 0.05, random_state=generator)
    values, vectors = eigsh(matrix + matrix.T, k=16, which="LA", v0=np.ones(300))
    rotation = np.linalg.qr(generator.standard_normal((16, 16)))[0]
    return hashlib.sha256((vectors * np.sqrt(values.clip(min=0)) @ rotation).tobytes()).hexdigest()[:16]


def recorded_as(name: str) -> str:
    """The key of a case in the record of one kind of arithmetic."""
    return f"{name}, {factoring()}" if "warm_start" in CASES[name] else name


def _of_layers(long: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of recurrent cells and of attention, on sequences of 12."""
    sequences, found = long.view(700, 12, 16), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [torch.nn.GRU(16, 16, batch_first=True), torch.nn.LSTM(16, 16, batch_first=True)]
        layers += [torch.nn.MultiheadAttention(16, 2, batch_first=True)]
    for layer in layers:
        given = (sequences,) * (3 if isinstance(layer, torch.nn.MultiheadAttention) else 1)
        layer(*given)[0].square().sum().backward()
        found += [p.grad for p in layer.parameters() if p.grad is not None]
    return found


def outcome(name: str, folder: Path) -> dict[str, Any]:
    """The losses of a run, and the hash of every tensor that it releases."""
    choices = dict(CASES[name])
    if choices.get("task") == "lm":
        choices["file"] = folder / "text.txt"
        choices["file"].write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Config, "hash", lambda self: "recorded")
        train(Config.make(**choices), folder / "run")
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    digest = hashlib.sha256()
    for key, tensor in sorted(load_file(folder / "run" / "model.safetensors").items()):
        if key.startswith("model.") or key == "frequencies":
            digest.update(key.encode() + tensor.numpy().tobytes())
    return {"losses": [round(step["loss"], 9) for step in steps if "loss" in step], "released": digest.hexdigest()}


@pytest.mark.parametrize("name", CASES)
def test_as_recorded(name: str, tmp_path: Path) -> None:
    runs = json.loads(RECORD.read_text()).get(arithmetic())
    if runs is None or recorded_as(name) not in runs:
        pytest.skip("not recorded on a processor that rounds as this one does")
    assert outcome(name, tmp_path) == runs[recorded_as(name)]


def main() -> None:
    torch.set_num_threads(1)
    runs = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            runs[recorded_as(name)] = outcome(name, Path(folder))
    records = json.loads(RECORD.read_text())
    records[arithmetic()] = {**records.get(arithmetic(), {}), **runs}
    RECORD.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
