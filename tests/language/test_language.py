"""A language model from file to generated text: the loss against a naive twin, and the whole command line."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from dpformer.cli import app
from dpformer.data.text import read_text
from dpformer.data.tokens import Tokens
from dpformer.errors import DpformerError
from dpformer.evaluation.language import generate, language_loss
from dpformer.models import Transformer
from dpformer.runs import Config, resume, train
from dpformer.runs.model_file import load_release
from tests.language.test_text import tokenizer_file
from tests.training.crash import Crash, crash_after
from tests.training.memo import remember

LENGTH = 8


@pytest.fixture(autouse=True, scope="module")
def accountant_remembers() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        remember(patch.setattr)
        yield


def model_of(num_items: int = 11) -> Transformer:
    torch.manual_seed(0)
    return Transformer(num_items, LENGTH, dim=8, blocks=1).eval()


class TestLoss:
    def test_against_a_naive_twin(self) -> None:
        """One token at a time, from the tokens before it in its window."""
        model, rng = model_of(), np.random.default_rng(0)
        texts = [rng.integers(0, 11, n) for n in (1, 2, 8, 9, 10, 30)]
        nats, tokens = 0.0, 0
        for text in texts:
            for at in range(1, len(text)):
                start = (at - 1) // LENGTH * LENGTH
                scores = model.scores([text[start:at]])[0].detach()
                nats += float(F.cross_entropy(scores[None].double(), torch.tensor([int(text[at])])))
                tokens += 1
        found = language_loss(model, texts)
        assert found.tokens == tokens == sum(max(0, len(text) - 1) for text in texts)
        assert found.nats == pytest.approx(nats, rel=1e-5)
        facts = found.to_dict()
        assert facts["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
        assert facts["bits_per_character"] == pytest.approx(nats / tokens / math.log(2), rel=1e-5)
        assert language_loss(model, texts, characters=2 * tokens).to_dict()["bits_per_character"] == pytest.approx(
            nats / 2 / tokens / math.log(2), rel=1e-5
        )

    def test_nothing_to_predict(self) -> None:
        with pytest.raises(DpformerError, match="no held-out text"):
            language_loss(model_of(), [np.array([3])])


class TestGenerate:
    def test_draws_from_the_model(self) -> None:
        model = model_of()
        first = [generate(model, [1, 2], 1, seed=seed, top_k=3, never=4)[0] for seed in range(200)]
        scores = model.scores([[1, 2]])[0].detach()
        scores[4] = -math.inf
        assert set(first) <= set(scores.topk(3).indices.tolist())
        assert generate(model, [1, 2], 1, temperature=0, never=4)[0] == int(scores.argmax())
        assert generate(model, [1], 20, seed=5) == generate(model, [1], 20, seed=5)
        assert len(generate(model, list(range(10)), 20)) == 20, "longer than the model sees"


def corpus(path: Path) -> Path:
    path.write_text("".join(f"to be or not to be {number}\n" for number in range(100)))
    return path


def config_of(file: Path, **changes: Any) -> Config:
    size = {"dim": 16, "blocks": 1, "max_length": 12, "batch_size": 20, "epochs": 3}
    run = {"epsilon": 6.0, "seed": 3, "threads": 1, "learning_rate": 0.01, "evaluate_every": 1}
    return Config.make(file=file, **{"task": "lm", "unit": "line", **size, **run, **changes})


def test_from_file_to_text(tmp_path: Path) -> None:
    run = train(config_of(corpus(tmp_path / "corpus.txt")), tmp_path / "run")
    statement = run.statement
    assert statement["unit"] == "line" and statement["adjacency"].startswith(
        "zero-out: adding or removing one line of the text"
    )
    assert any("line by line" in sentence for sentence in [*statement["words"], *statement["data"]])
    assert [event["label"] for event in statement["events"]] == ["frequencies", "training"]
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["text"]["loss"] for line in lines if "text" in line]
    assert losses[-1] < losses[0] < 5

    answer = CliRunner().invoke(app, ["evaluate", str(run.folder), "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["metrics"]["loss"] == pytest.approx(losses[-1], rel=1e-5)
    assert "perplexity" in CliRunner().invoke(app, ["evaluate", str(run.folder)]).stdout

    for place in (run.folder, run.folder / "model.safetensors"):
        drawn = CliRunner().invoke(app, ["generate", str(place), "--prompt", "to é", "--length", "30", "--seed", "1"])
        assert drawn.exit_code == 0 and drawn.stdout.startswith("to é") and len(drawn.stdout) == 4 + 30 + 1
        assert "\ufffd" not in drawn.stdout


@pytest.mark.parametrize("unit", ["chunk", "author"])
def test_author_level_with_a_tokenizer(tmp_path: Path, unit: str) -> None:
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")
    file = tmp_path / "corpus"
    if unit == "author":
        file.write_text("".join(json.dumps({"author": i % 50, "text": "to be or not"}) + "\n" for i in range(150)))
    else:
        corpus(file)
    config = config_of(file, unit=unit, tokenizer=tokenizer, reattention=True, epochs=1, batch_size=10)
    run = train(config, tmp_path / "run")
    assert run.statement["unit"] == unit and run.statement["headline"].startswith("NOT PRIVATE")  # seeded
    tokenizer.unlink()  # the model knows it
    release = load_release(run.folder / "model.safetensors")
    assert len(release.vocabulary) == 5
    drawn = CliRunner().invoke(app, ["generate", str(run.folder), "--prompt", "to be", "--length", "3", "--json"])
    assert drawn.exit_code == 0 and len(json.loads(drawn.stdout)["text"].split()) == 3


def test_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(corpus(tmp_path / "corpus.txt"), checkpoint_seconds=0.0, evaluate_every=0)
    train(config, tmp_path / "whole")
    crash_after(monkeypatch, 4)
    with pytest.raises(Crash):
        train(config, tmp_path / "broken")
    monkeypatch.undo()
    resume(tmp_path / "broken")
    assert (tmp_path / "broken/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"unit": None}, "the unit of privacy is missing: give --unit chunk, line, document or author"),
        ({"characters": "ascii", "tokenizer": "t.json"}, "characters and tokenizer are both given"),
        ({"min_user_actions": 3}, "min_user_actions applies to logs of items, not to text"),
        ({"task": "recommend"}, "unit applies to text: give --task lm"),
        ({"file": None}, "--task lm needs a file of text"),
        ({"model": "counts"}, "counts support items of users only"),
    ],
)
def test_refused_choices(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(DpformerError, match=message):
        Config.make(**{"file": "x.txt", "task": "lm", "unit": "line", **choices})


def test_a_recommender_writes_no_text(tmp_path: Path) -> None:
    from dpformer.runs.model_file import save_release

    model = Transformer(3, 4, dim=4, blocks=1)
    save_release(tmp_path / "model.safetensors", model, vocabulary=["a", "b", "c"], metadata={})
    answer = CliRunner().invoke(app, ["generate", str(tmp_path / "model.safetensors")])
    assert "was not trained on text" in str(answer.exception)


def test_tinyshakespeare_is_split_as_usual(real_data: Path) -> None:
    """1,003,854 and 111,540 characters; all of them are printable ASCII."""
    dataset = read_text(real_data / "tinyshakespeare.txt", unit="chunk", tokens=Tokens.of_characters(), max_length=256)
    assert dataset.num_interactions == 1_003_854 and len(dataset.held_out_text[0]) == 111_540
    assert dataset.num_users == 3922 and dataset.items.max() < 96


def test_the_papers_sizes() -> None:
    config = Config.make(file="x.txt", recipe="paper-lm", unit="chunk")
    assert (config.dim, config.heads, config.blocks, config.dropout, config.shared) == (384, 6, 6, 0.2, True)
    smaller = Config.make(file="x.txt", recipe="paper-lm", unit="chunk", dim=96)
    assert (smaller.dim, smaller.blocks) == (96, 6)


def test_a_plan_without_reading_the_text() -> None:
    from dpformer.runs.estimate import dry_run

    config = Config.make(file="not-there.txt", task="lm", unit="line", dim=8, blocks=1, max_length=6, epochs=1)
    facts = dry_run(config, users=200)
    assert facts["users"] == 200 and facts["estimate"]["parameters"] > 97 * 8
