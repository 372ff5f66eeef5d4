"""The table of readers. A reader gets a file from a stranger: it reads it, or raises one clear sentence."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from dpformer.errors import DpformerError
from fuzz import seeds

Seeds = Callable[[], list[bytes]]


@dataclass(frozen=True)
class Target:
    """What to do with a file, how such a file ends, and some that are valid."""

    read: Callable[[Path], object]
    suffix: str
    seeds: Seeds
    refusals: tuple[type[Exception], ...] = (DpformerError,)
    slow: bool = False  # accounting or a page for each valid file: fewer examples


def try_one(target: Target, content: bytes, folder: Path) -> bool:
    """Whether the content was read; False if it was refused in a sentence. Anything else is a fault, and raises."""
    path = folder / f"input{target.suffix}"
    path.write_bytes(content)
    try:
        target.read(path)
    except target.refusals as error:
        assert str(error) and "\n" not in str(error), f"not one sentence: {error!r}"
        return False
    return True


# Readers, with what must hold of all that they read.


def _log(path: Path) -> None:
    from dpformer.data import Dataset, prepare

    dataset = prepare(path, max_length=5)
    assert isinstance(dataset, Dataset) and dataset.offsets[-1] == len(dataset.items)
    assert not len(dataset.items) or 0 <= dataset.items.min() <= dataset.items.max() < dataset.num_items


def _catalog(path: Path) -> None:
    from dpformer.data import read_catalog

    found = read_catalog(path)
    assert len(set(found.ids)) == len(found)


def _text(unit: Any, path: Path) -> None:
    from dpformer.data.text import read_text

    found = read_text(path, unit=unit, tokens=_characters(), max_length=8)
    assert 0 <= found.items.min() <= found.items.max() < found.num_items


@cache
def _characters() -> Any:
    from dpformer.data.tokens import Tokens

    return Tokens.of_characters("ascii")


def _tokenizer(path: Path) -> None:
    from dpformer.data.tokens import Tokens

    tokens = Tokens.of_file(path)
    assert len(tokens.vocabulary) >= 1 + max(tokens.encode("ab a\u00e9"), default=0)


def _histories(path: Path) -> None:
    from dpformer.serving.histories import read_histories
    from dpformer.serving.packed import IGNORE, Packed

    found = read_histories(path)
    packed = Packed.of(found, seeds_release(), IGNORE)
    assert len(packed) == len(found.user_ids) and packed.offsets[-1] == len(packed.items)
    assert len(packed.items) + packed.unknown == len(found.codes)
    assert not len(packed.items) or 0 <= packed.items.min() <= packed.items.max() < seeds.ITEMS


@cache
def seeds_release() -> Any:
    from dpformer.runs import load_release

    return load_release(seeds.run("transformer") / "model.safetensors")


def _config(path: Path) -> None:
    from dpformer.runs.config import Config

    found = Config.make(path)
    found = (found.replace(model="counts") if found.model == "auto" else found).resolve(users=10**6, threads=1)
    path.write_text(found.to_toml(), encoding="utf-8")
    assert Config.make(path) == found, "what is written is what is read"


def _checkpoint(path: Path) -> None:
    from dpformer.runs.checkpoint import load_checkpoint

    load_checkpoint(path, config="c", data="d")


def _checkpoint_body(path: Path) -> None:
    """A stranger can make the digest right, too."""
    import torch
    from safetensors.torch import save_file

    from dpformer.runs.checkpoint import _digest

    try:
        body = path.read_bytes().decode()
    except UnicodeDecodeError:
        return
    tensors = {"000000": torch.ones(2, 3)}
    header = json.dumps({"digest": _digest(body, tensors), "body": body})
    save_file(tensors, path, {"dpformer-checkpoint": header})
    _checkpoint(path)


def _release(path: Path) -> None:
    from dpformer.runs import load_release

    release = load_release(path)
    assert len(release.vocabulary) == release.model.num_items
    release.recommend([release.index(release.vocabulary[:2])], 3)


def _release_header(name: str, path: Path) -> None:
    """A stranger can make the digest right, too."""
    from safetensors.torch import load_file, save_file

    from dpformer.runs.model_file import _digest

    tensors = load_file(seeds.run(name) / "model.safetensors")
    try:
        about = json.loads(path.read_bytes())
        about.pop("sha256", None)
        header = json.dumps({**about, "sha256": _digest(about, tensors)}, allow_nan=False)
    except (ValueError, TypeError, AttributeError, RecursionError):
        header = path.read_bytes().decode("utf-8", "replace")
    save_file(tensors, path, {"dpformer": header})
    _release(path)


def _ledger(path: Path) -> None:
    from dpformer.accounting import Ledger

    ledger = Ledger.from_json(path.read_text(encoding="utf-8"))
    assert Ledger.from_json(ledger.to_json()) == ledger


def _budget(path: Path) -> None:
    from dpformer.runs.ledger_file import read

    budget = read(path)
    assert budget.epsilon > 0 and 0 < budget.delta < 1 and all(run["started"] >= "" for run in budget.runs)


def _releases(path: Path) -> None:
    from dpformer.queries.transitions.query import TRANSITIONS
    from dpformer.runs.releases_file import load_releases

    found = TRANSITIONS.restore(load_releases(path), *_counts())
    for one in found.rounds:
        assert len(one.noisy) in (len(one.cells), 2 * len(one.cells))


@cache
def _counts() -> tuple[Any, Any]:
    """A config of counts and its plan."""
    from dpformer.runs.config import Config
    from dpformer.runs.planning import make_plan

    config = Config.make(model="counts", epsilon=8.0).resolve(users=600, threads=1)
    return config, make_plan(config, 600)


@cache
def _copy_of_run(name: str) -> Path:
    from tests.training.memo import remember

    remember()  # the accountant answers the same question once: most of the time would go there
    folder = Path(tempfile.mkdtemp(dir=seeds.run(name).parent))
    return Path(shutil.copytree(seeds.run(name), folder / "run"))


def _statement(name: str, path: Path) -> None:
    """`verify` never falls over, and lets nothing pass that says something else; nor do commands that show it."""
    from dpformer.report.content import gather
    from dpformer.report.page import render
    from dpformer.runs import finished
    from dpformer.verification.statement_check import same
    from dpformer.verification.verify import verify

    run = _copy_of_run(name)
    (run / "privacy.json").write_bytes(path.read_bytes())
    if verify(run).passed:
        said, true = json.loads(path.read_bytes()), json.loads(seeds.statement(name))
        said["data"] = true["data"]  # sentences on the data are compared where the data is read
        assert same(said, true, 1e-6), "a false statement passed"
    render(gather(finished(run), public=True))


def _metrics(path: Path) -> None:
    from dpformer.report.content import gather
    from dpformer.report.page import render
    from dpformer.runs import finished
    from dpformer.runs.folder import Metrics

    run = _copy_of_run("transformer")
    (run / "metrics.jsonl").write_bytes(path.read_bytes())
    try:
        render(gather(finished(run)))
    finally:
        Metrics(path, 3).close()  # what a resumed run does with the lines of the killed one


def _one(make: Callable[[], bytes]) -> Seeds:
    return lambda: [make()]


def _csv() -> list[bytes]:
    return [seeds.table(",", "user_id,item_id,rating,timestamp\n"), seeds.table(";", "user;item;rating;time\n")]


def _law(name: str, path: Path) -> None:
    """The file is one user's rows within a log."""
    from fuzz.law import hostile_rows_change_nobody

    with tempfile.TemporaryDirectory() as folder:
        for skip in (False, True):
            hostile_rows_change_nobody(Path(folder), name, path.read_bytes(), first=True, skip=skip)


LAWS = ("csv", "unquoted", "headerless", "tsv", "inter", "movielens", "lines", "jsonl")

TARGETS: dict[str, Target] = {
    **{
        f"law-{name}": Target(partial(_law, name), ".rows", lambda: [b'troll,"i1",1\r\n', b"troll\ti1\t1.5"], slow=True)
        for name in LAWS
    },
    "csv": Target(_log, ".csv", _csv),
    "tsv": Target(_log, ".tsv", lambda: [seeds.table("\t", "user_id\titem_id\trating\ttimestamp\n")]),
    "inter": Target(_log, ".inter", lambda: [seeds.table("\t", "user_id:token\titem_id:token\tr:float\ttime:float\n")]),
    "movielens": Target(_log, ".dat", lambda: [seeds.table("::")]),
    "lines": Target(_log, ".txt", lambda: [b"".join(f"{u} {i}\n".encode() for u, i, *_ in seeds.ROWS)]),
    "jsonl": Target(_log, ".jsonl", lambda: [seeds.json_lines("user_id", "item_id", "rating", "timestamp")]),
    "parquet": Target(_log, ".parquet", _one(seeds.parquet)),
    "catalog": Target(_catalog, ".csv", seeds.catalog),
    "text-lines": Target(partial(_text, "line"), ".txt", lambda: [b"".join(b"Line %d.\n" % n for n in range(40))]),
    "text-chunks": Target(partial(_text, "chunk"), ".txt", lambda: ["Wörter, words. ".encode() * 20]),
    "text-documents": Target(partial(_text, "document"), ".jsonl", _one(seeds.texts)),
    "text-authors": Target(partial(_text, "author"), ".jsonl", _one(seeds.texts)),
    "tokenizer": Target(_tokenizer, ".json", _one(seeds.tokenizer)),
    "histories": Target(_histories, ".jsonl", _one(seeds.histories)),
    "config": Target(_config, ".toml", _one(seeds.config)),
    "checkpoint": Target(_checkpoint, ".safetensors", _one(seeds.checkpoint)),
    "checkpoint-body": Target(_checkpoint_body, ".safetensors", _one(seeds.checkpoint_body)),
    "release": Target(_release, ".safetensors", lambda: [seeds.model("transformer"), seeds.model("counts")]),
    "release-header": Target(
        partial(_release_header, "transformer"), ".safetensors", lambda: [seeds.model_header("transformer")]
    ),
    "counts-header": Target(partial(_release_header, "counts"), ".safetensors", lambda: [seeds.model_header("counts")]),
    "releases": Target(_releases, ".safetensors", _one(seeds.releases), (DpformerError, ValueError)),
    "budget": Target(_budget, ".db", _one(seeds.budget)),
    "ledger": Target(_ledger, ".json", _one(seeds.ledger), (ValueError,)),
    "statement": Target(
        partial(_statement, "transformer"), ".json", lambda: [seeds.statement("transformer")], slow=True
    ),
    "counts-statement": Target(partial(_statement, "counts"), ".json", lambda: [seeds.statement("counts")], slow=True),
    "metrics": Target(_metrics, ".jsonl", _one(seeds.metrics), slow=True),
}
