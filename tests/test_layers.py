"""Imports follow the data, one way: the layers are in pyproject.toml. A walk through the library meets few files."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import dpformer as dp
from dpformer.runs import train
from tests.training.conftest import tiny_config
from tests.training.logs import write_log
from tests.training.memo import accountant_remembers  # noqa: F401

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "dpformer"


def test_imports_go_down_the_layers() -> None:
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports anywhere, in functions too, but not for types alone."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_two_files_import_each_other() -> None:
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {name: set(imports(path)) & files.keys() for name, path in files.items()}
    assert sum(map(len, graph.values())) > 1000
    assert not [(one, other) for one in graph for other in graph[one] if one in graph[other]]


def walked(what: Callable[[], Any]) -> set[str]:
    """Files of the package in which a function runs; what an import executes does not count."""
    found: set[str] = set()
    importing = 0

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal importing
        code = frame.f_code
        if code.co_name == "<module>":
            importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not importing and code.co_filename.startswith(str(PACKAGE)):
            found.add(str(Path(code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(see)
    try:
        what()
    finally:
        sys.setprofile(None)
    return found


def test_a_private_step_walks_through_no_more_files_than_it_did() -> None:
    """A step of a model of one's own, after the first, which is checked. The limit may only fall."""
    model = nn.Sequential(nn.Embedding(9, 8), nn.Flatten(1), nn.Linear(24, 9))
    clipping = dp.PhantomClipping(model)
    optimizer = dp.PrivateOptimizer(
        torch.optim.Adam(model.parameters()), noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=10
    )
    histories = torch.randint(0, 9, (20, 3))
    batches = dp.PoissonBatches(20, sample_rate=0.5, steps=4)

    def step() -> None:
        batch = batches.batch(optimizer.steps)
        with clipping.users(histories[batch.users], batch[:]) as user:
            loss = nn.functional.cross_entropy(model(user), user[:, 0])
        clipping.backward(loss, dp.normalize(1.0))
        optimizer.step(batch)
        optimizer.zero_grad()

    step()
    found = walked(step)
    assert len(found) <= 40, sorted(found)


def test_from_a_csv_file_to_a_transformer_walks_through_no_more_files_than_it_did(tmp_path: Path) -> None:
    """The limit may only fall."""
    log = write_log(tmp_path / "log.csv")
    found = walked(lambda: train(tiny_config(log, epochs=1), tmp_path / "run"))
    assert len(found) <= 137, sorted(found)
