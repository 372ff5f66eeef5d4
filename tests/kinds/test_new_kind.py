"""A kind of model of one's own, all of it in this file: released popularity, the same list for everybody.

From `--model popular` to training, statement, evaluation, recommendations, report, verification, audit and export.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpformer.accounting.events import Event
from dpformer.findings import Finding
from dpformer.kinds.base import Mechanism, ModelKind
from dpformer.kinds.network import OF_NETWORKS
from dpformer.kinds.planning import calibrated
from dpformer.kinds.registry import KINDS, kind_of, register
from dpformer.queries.item_queries import FREQUENCIES
from dpformer.queries.registry import all_queries
from dpformer.runs import Config, load_dataset, load_release, resume, train
from dpformer.runs.model_file import Release, sha256_of
from dpformer.runs.session import Session
from dpformer.training.plan import Plan
from dpformer.verification.verify import verify
from tests.tiny_runs import invoke, printed, refused, write_catalog
from tests.training.logs import write_log


class PopularItems(nn.Module):
    """Scores every item by its released popularity."""

    popularity: Tensor  # (M,)
    max_length = 1

    def __init__(self, num_items: int) -> None:
        super().__init__()
        self.num_items, self.arguments = num_items, {"num_items": num_items}
        self.register_buffer("popularity", torch.ones(num_items))

    def scores(self, histories: Sequence[Any]) -> Tensor:
        return self.popularity.log().expand(len(histories), -1).clone()

    def next_scores(self, items: Tensor, lengths: Tensor) -> Tensor:
        return torch.zeros_like(lengths, dtype=torch.float32)[:, None] + self.popularity.log()

    def output_weight(self) -> Tensor:
        return self.popularity[:, None]


class PopularKind(ModelKind):
    name = "popular"
    title = "Popular items"
    phrase = "the most popular items"
    summary = "popular: the same list for everybody"
    classes = {"PopularItems": __name__}  # noqa: RUF012
    silent = OF_NETWORKS
    trains = False
    text = False
    release = FREQUENCIES

    def needs_frequencies(self, config: Config) -> bool:
        return True

    def mechanism(self, config: Config, users: int, others: tuple[Event, ...]) -> Mechanism:
        noise = calibrated(config, 1.0, 1, others)
        return Mechanism(users, 0, noise, (FREQUENCIES.event(config, noise),) if config.private else ())

    def estimate(self, config: Config, plan: Plan, items: int) -> dict[str, Any]:
        return {"parameters": items, "seconds": 0.0, "memory": 8 * items}

    def effort(self, estimate: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [("time", "no time at all")]

    def fit(self, session: Session) -> PopularItems:
        model = PopularItems(len(session.vocabulary))
        model.popularity.copy_(session.released.frequencies)
        return model.eval()

    def constants(self, config: Config, plan: Plan, release: Release) -> Finding:
        assert release.frequencies is not None
        same = np.allclose(release.model.popularity, release.frequencies)
        return Finding("constants of the model", same, "popularity is what was released")


@pytest.fixture(autouse=True)
def popular() -> Iterator[PopularKind]:
    kind = register(PopularKind())
    try:
        yield kind
    finally:
        del KINDS[kind.name]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_log(tmp_path / "log.csv", users=300), write_catalog(tmp_path / "items.csv")


def test_from_the_command_line_to_recommendations(files: tuple[Path, Path], tmp_path: Path) -> None:
    log, catalog = files
    run = tmp_path / "run"
    assert "no time at all" in printed(
        "train", log, "--model", "popular", "--catalog", catalog, "--dry-run", "--users", 300
    )
    done = invoke("train", log, "--model", "popular", "--catalog", catalog, "--private-metrics", "--out", run)
    assert done.exit_code == 0 and "user-level" in done.stdout.lower(), done.stderr
    facts = json.loads((run / "privacy.json").read_text())
    assert facts["model"] == "popular" and [event["label"] for event in facts["events"]] == ["metrics", "frequencies"]
    assert 4.9 < facts["epsilon"] <= 5 and facts["steps"] is None
    assert not [line for line in (run / "config.toml").read_text().splitlines() if line.startswith("dim")]
    model = load_release(run / "model.safetensors").model
    assert isinstance(model, PopularItems) and kind_of(model).name == "popular"
    metrics = json.loads(printed("evaluate", run, "--json"))["metrics"]
    assert metrics["model"]["served"]["hit@10"]["value"] == pytest.approx(
        metrics["popularity"]["served"]["hit@10"]["value"], abs=0.1
    )
    listed = printed("recommend", run, "--history", "i1,i2", "-k", 3)
    assert len(re.findall(r"\bi\d+\b", listed)) >= 3
    assert "Popular items" in Path(printed("report", run).split()[-1]).read_text()
    assert json.loads(printed("audit", run, "--canaries", 600, "--seed", 0, "--json"))["of"] == "metrics, frequencies"
    assert printed("verify", run)


def test_its_model_is_verified_against_what_was_released(files: tuple[Path, Path], tmp_path: Path) -> None:
    log, catalog = files
    config = Config.make(file=log, model="popular", catalog=catalog, threads=1)
    run = train(config, tmp_path / "run").folder
    data = load_dataset(config)
    assert verify(run, dataset=data).passed and resume(run).statement["epsilon"] <= 5
    from dpformer.runs.model_file import save_release

    found = load_release(run / "model.safetensors")
    found.model.popularity[0] = 0.5
    given = {"vocabulary": found.vocabulary, "titles": found.titles, "metadata": found.metadata}
    save_release(run / "model.safetensors", found.model, frequencies=found.frequencies, **given)
    facts = json.loads((run / "privacy.json").read_text())
    facts["hashes"]["model"] = sha256_of(run / "model.safetensors")
    (run / "privacy.json").write_text(json.dumps(facts))
    wrong = [finding.name for finding in verify(run, dataset=data).findings if finding.ok is False]
    assert wrong == ["constants of the model"]


def test_it_is_exported(files: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    log, catalog = files
    train(Config.make(file=log, model="popular", catalog=catalog, threads=1), tmp_path / "run")
    assert "ONNX Runtime agrees" in printed("export", tmp_path / "run", tmp_path / "model.onnx")


def test_what_it_cannot_do_is_refused(files: tuple[Path, Path]) -> None:
    log, _ = files
    assert "epochs does not apply to the model popular" in refused("train", log, "--model", "popular", "--epochs", 3)
    assert "popular support items of users only" in refused(
        "train", log, "--model", "popular", "--task", "lm", "--unit", "line"
    )
    with pytest.raises(ValueError, match="a kind of model 'popular' already exists"):
        register(PopularKind())
    assert all(query.label for query in all_queries())


def test_no_other_file_names_a_kind() -> None:
    """A comparison with a name outside the kind's own file is a special case that a new kind would miss."""
    source = Path(__file__).parents[2] / "src" / "dpformer"
    names = "|".join(name for name in KINDS if name != "popular")
    quoted = re.compile(rf"[\"']({names})[\"']")
    at_home = {source / "kinds" / name for name in ("counts.py", "transformer.py", "recurrent.py", "pretrained.py")}
    # An attribute of GPT-2; and the verifier that shares no code with the package, names of kinds included.
    elsewhere = {source / "reattention" / "huggingface.py", source / "verification" / "standalone.py"}
    found = [
        f"{path}: {line.strip()}"
        for path in sorted(set(source.rglob("*.py")) - at_home - elsewhere)
        for line in path.read_text().splitlines()
        if quoted.search(line)
    ]
    assert not found, "\n".join(found)
