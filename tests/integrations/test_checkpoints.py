"""`dpformer train text.jsonl --task lm --model FOLDER --lora 8`: checkpoints made here, tied and not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import dpformer as dp
from dpformer.cli import app
from dpformer.models import Batch
from dpformer.models.pretrained import Pretrained
from tests.clipping.naive import clipped_sum, engine, norms_of, relative_error, sums
from tests.clipping.test_huggingface import MODELS

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
LETTERS = "\n etaoinshrdlucmf"  # 17 tokens


def checkpoint(folder: Path, name: str) -> Path:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    MODELS[name]().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token="f"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def gradients(model: Pretrained, batch: Batch) -> list[torch.Tensor]:
    """Of one user, by plain autograd."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(model(batch)[0], parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_exact_and_the_same_logits(name: str, lora: int, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, name)
    model = Pretrained.read(folder, 17, 7, lora).double()
    for key, p in model.named_parameters():
        if "lora_B" in key:  # zero at the start, which would leave lora_A without a gradient
            torch.nn.init.normal_(p)
    draw = np.random.default_rng(0)
    histories = [draw.integers(0, 17, length) for length in (8, 5, 3)]
    batch = Batch.from_histories(histories, 7)
    truth = [gradients(model, Batch.from_histories([history], 7)) for history in histories]
    norms = engine(model, (batch,), dp.normalize(1.0))
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-8, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-8
    if not lora:
        whole = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
        ids = torch.from_numpy(histories[0])[None]
        nats = F.cross_entropy(whole(input_ids=ids[:, :-1]).logits[0], ids[0, 1:])
        assert float(model(batch)[0].detach()) == pytest.approx(float(nats.detach()), rel=1e-6)


def invoke(*given: Any) -> str:
    done = CliRunner().invoke(app, [str(part) for part in given], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(("name", "lora"), [("gpt2-tied", 2), ("llama-untied", 0)])
def test_train_evaluate_generate_export(name: str, lora: int, tmp_path: Path) -> None:
    folder, run, out = checkpoint(tmp_path / "base", name), tmp_path / "run", tmp_path / "out"
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice(list(LETTERS[1:]), 9)) for _ in range(80)]
    rows = [{"author": f"u{number % 40}", "text": text} for number, text in enumerate(texts)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    invoke(
        "train", tmp_path / "text.jsonl", "--task", "lm", "--unit", "author", "--model", folder, "--lora", lora,
        "--epsilon", 8, "--batch-size", 10, "--epochs", 1, "--evaluate-every", 1, "--out", run,
    )  # fmt: skip
    statement = json.loads((run / "privacy.json").read_text())
    assert statement["headline"].startswith("Author-level") and statement["private"]
    assert "loss" in invoke("evaluate", run, "--json")
    written = json.loads(invoke("generate", run, "--prompt", "tea", "--length", 5, "--seed", 1, "--json"))["text"]
    assert len(written) == 5 and set(written) <= set(LETTERS)
    assert "model.safetensors" in invoke("export", run, out)
    invoke("verify", run)
    invoke("report", run)
    assert list(run.glob("*.html"))
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert json.loads((out / "privacy.json").read_text()) == statement
    assert "differential_privacy" in (out / "README.md").read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer("tea", add_special_tokens=False)["input_ids"]
    assert ids == [LETTERS.index(letter) for letter in "tea"]
    from dpformer.runs.model_file import load_release

    with torch.no_grad():
        ours = load_release(run / "model.safetensors").model.scores([ids])[0]
        theirs = again(input_ids=torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    moved = [k for k, v in base.state_dict().items() if not torch.equal(v, again.state_dict()[k])]
    assert moved and (not lora or all("c_" in key for key in moved))  # adapters are in linear layers only


@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_on_a_checkpoint_is_resumed(bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    from dpformer.training.trainer import Trainer

    folder = checkpoint(tmp_path / "base", "gpt2-tied")
    rows = [{"author": f"u{number % 40}", "text": "see us at nine"} for number in range(80)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["train", tmp_path / "text.jsonl", "--task", "lm", "--unit", "author", "--model", folder, "--lora", 2]
    given += ["--epsilon", 8, "--batch-size", 10, "--epochs", 1, "--seed", 3, "--checkpoint-seconds", 0]
    given += ["--bf16"] if bf16 else []
    invoke(*given, "--out", tmp_path / "whole")
    advance = Trainer.advance

    def stopped(self: Trainer) -> Any:
        if self.step == 2:
            raise KeyboardInterrupt
        return advance(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", stopped)
        done = CliRunner().invoke(app, [str(part) for part in (*given, "--out", tmp_path / "part")])
        assert done.exit_code == 130, done.output
    invoke("train", "--resume", tmp_path / "part")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.test_guides import commands

    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "checkpoint", "gpt2-tied")
    rows = [{"author": f"u{number % 40}", "text": "see us at nine"} for number in range(80)]
    Path("messages.jsonl").write_text("\n".join(map(json.dumps, rows)))
    written = commands("trainers.md", "dpformer")
    assert [command[0] for command in written] == ["train", "evaluate", "generate", "export"]
    for command in written:
        small = ["--epochs", 1, "--batch-size", 10] if command[0] == "train" else []
        invoke(*command, *small, *(["--length", 3] if command[0] == "generate" else []))
    assert (tmp_path / "model" / "privacy.json").is_file()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--task", "lm", "--unit", "line", "--model", "nowhere"], "or a folder"),
        (["--task", "lm", "--unit", "line", "--model", "base", "--dim", "8"], "determined by the checkpoint base"),
        (["--task", "lm", "--unit", "line", "--lora", "8"], "lora applies to checkpoints"),
        (["--model", "base"], "give --task lm"),
        (["--task", "lm", "--unit", "line", "--model", "base", "--characters", "ascii"], "its own tokenizer"),
        (["--task", "lm", "--unit", "line", "--model", "empty"], "config.json"),
        (["--task", "lm", "--unit", "line", "--model", "base", "--max-length", "9"], "8 positions"),
    ],
)
def test_refused(given: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "base", "gpt2-tied")
    (tmp_path / "empty").mkdir()
    Path("text.txt").write_text("to be\nor not\n" * 30)
    done = CliRunner().invoke(app, ["train", "text.txt", *given, "--out", "run"])
    assert says in str(done.exception or done.output), (done.output, done.exception)
    assert not Path("run").exists()
