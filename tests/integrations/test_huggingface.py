"""PrivateTrainer: the same model as a loop written out, exact resume, no key in anything one uploads, and attacks."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dpformer as dp
from dpformer.errors import DpformerError
from dpformer.integrations.users import Users
from tests.integrations.secrets import a_leak_is_found, no_secret_in
from tests.integrations.texts import arguments, collate, gpt2, rows

transformers = pytest.importorskip("transformers")
from dpformer.integrations.huggingface import PrivateTrainer  # noqa: E402


def trainer(folder: Path, model: Any = None, seed: int | None = 5, **changes: Any) -> PrivateTrainer:
    given = {name: changes.pop(name) for name in list(changes) if name in ARGUMENTS}
    own = {"train_dataset": rows(most=2), "users": "author", "unit": "author", "data_collator": collate}
    return PrivateTrainer(
        gpt2() if model is None else model, arguments(folder, **given), epsilon=8, seed=seed, **{**own, **changes}
    )


ARGUMENTS = {field for field in transformers.TrainingArguments.__dataclass_fields__ if field != "seed"}


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def naive(steps: int, examples: list[dict[str, Any]]) -> tuple[list[torch.Tensor], dp.Ledger]:
    """The first sum of a loop written out, user by user, by plain autograd in float64; and the ledger of all steps."""
    model, people = gpt2().double(), Users(examples, "author")
    n, q = len(people), 8 / len(people)
    sigma = dp.calibrate(epsilon=8, delta=1 / (10 * n), sample_rate=q, steps=steps)
    ledger = dp.Ledger()
    ledger.poisson_gaussian(sigma, q, steps, "training", private=False)
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for user in dp.PoissonBatches(n, q, steps, seed=5).draw(0):
        nats, count = torch.zeros((), dtype=torch.float64), 0
        for example in people[user]:
            ids = torch.tensor([example["input_ids"]])
            nats = nats + F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum")
            count += ids.shape[1] - 1
        grads = torch.autograd.grad(nats / count, list(model.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        sums = [total + g / (norm + 0.01) for total, g in zip(sums, grads, strict=True)]
    return sums, ledger


def test_first_sum_and_ledger_of_the_loop_written_out(tmp_path: Path) -> None:
    examples = rows(most=2)
    truth, ledger = naive(2, examples)
    sums: list[list[torch.Tensor]] = []

    class Watching(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            sums.append([p.grad.clone() for p in model.parameters()])

    for rows_at_once, parts in ((4, 2), (1, 8)):  # micro-batches and accumulation never change the result
        made = trainer(
            tmp_path, gpt2().double(), max_steps=2, per_device_train_batch_size=rows_at_once,
            gradient_accumulation_steps=parts, callbacks=[Watching()],
        )  # fmt: skip
        made.train()
        assert made.ledger == ledger
    for found in (sums[0], sums[2]):
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)


def test_resume_and_what_is_saved(tmp_path: Path) -> None:
    """The same model bit for bit; no key in any file but the one in the vault, which has to be there."""
    out = tmp_path / "out"
    first = trainer(out, gpt2(dropout=0.1), seed=None, save_strategy="steps", save_steps=2)
    first.train()
    first.save_model(tmp_path / "model")
    first.model.save_pretrained(tmp_path / "again")

    (vault,) = (tmp_path / "out.keys").iterdir()
    assert stat.S_IMODE(vault.stat().st_mode) == 0o600 and stat.S_IMODE(vault.parent.stat().st_mode) == 0o700
    written = no_secret_in(tmp_path, vault)
    assert {"optimizer.pt", "trainer_state.json", "training_args.bin", "privacy.json"} <= {p.name for p in written}
    a_leak_is_found(tmp_path, vault, next(path for path in written if path.name == "optimizer.pt"))
    for path in written:
        if path.name == "trainer_state.json":  # exact statistics of the data are not there either
            assert "loss" not in path.read_text() and "grad_norm" not in path.read_text()

    facts = json.loads((tmp_path / "model" / "privacy.json").read_text())
    assert facts["steps"] == 4 and facts["private"] and facts["headline"].startswith("Author-level")
    assert "differential_privacy" in (tmp_path / "again" / "README.md").read_text().split("---")[1]
    assert json.loads((tmp_path / "again" / "privacy.json").read_text()) == facts

    second = trainer(out, gpt2(seed=1, dropout=0.1), seed=None)
    second.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert second.ledger == first.ledger
    for name, p in weights(second.model).items():
        assert torch.equal(p, weights(first.model)[name]), name

    other = trainer(out, seed=None, train_dataset=rows(most=2, seed=0)[::-1])
    with pytest.raises(DpformerError, match="not that of the run"):
        other.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    vault.unlink()
    with pytest.raises(DpformerError, match="keys of this run are not at"):
        trainer(out, seed=None).train(resume_from_checkpoint=str(out / "checkpoint-2"))


def test_budget_is_for_one_training(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=1)
    assert made.session.epsilon() == 0
    done = made.train()
    assert done.training_loss != done.training_loss and "train_loss" not in done.metrics  # not a number: not shown
    with pytest.raises(DpformerError, match="taken 1 steps of its budget"):
        made.train()
    with torch.no_grad():
        made.model.transformer.wte.weight.add_(1)
    with pytest.raises(DpformerError, match="changed after the last private step"):
        made.save_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_grad_norm": 0.5}, "clipping=dp.clip"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({"neftune_noise_alpha": 5.0}, "mixes users"),
        ({"auto_find_batch_size": True}, "must be set in advance"),
        ({"model_init": gpt2}, "its own budget"),
        ({"per_device_train_batch_size": 100}, "there are 24"),
    ],
)
def test_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DpformerError, match=says):
        trainer(tmp_path, **changes)


def test_a_compute_loss_that_would_never_be_called_is_refused(tmp_path: Path) -> None:
    """It trained on the model's own loss instead, and said nothing."""

    class Weighted(PrivateTrainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return 2 * model(**inputs).loss

    with pytest.raises(DpformerError, match=r"Weighted overrides compute_loss.*override user_losses"):
        Weighted(gpt2(), arguments(tmp_path), epsilon=8, train_dataset=rows(), users="author", data_collator=collate)


def test_the_step_of_a_subclass_that_adds_users_twice_is_refused(tmp_path: Path) -> None:
    class Twice(PrivateTrainer):
        def training_step(self, *given: Any, **named: Any) -> Any:
            super().training_step(*given, **named)
            return super().training_step(*given, **named)

    made = trainer(tmp_path)
    made.__class__ = Twice
    with pytest.raises(ValueError, match="in the sum of step 1 already"):
        made.train()
    assert made.session.taken == 0


def test_without_users_the_guarantee_is_for_examples(tmp_path: Path) -> None:
    """It said "user-level" of rows of a data set, of which a person may have hundreds."""
    made = trainer(tmp_path, users=None, unit=None, max_steps=1, train_dataset=rows(most=2), seed=None)
    made.train()
    facts = made.statement
    assert facts["unit"] == "example" and facts["headline"].startswith("Example-level differential privacy")
    assert "example by example, not as a person" in " ".join(facts["words"])
    made.save_model(tmp_path / "model")
    assert "Example-level" in (tmp_path / "model" / "README.md").read_text()
    assert trainer(tmp_path / "said", users=None, unit="user").session.unit.name == "user", "on the caller's word"
    assert trainer(tmp_path / "known", unit=None).session.unit.name == "user"


class Stolen(PrivateTrainer):
    """The attack: Trainer's own backward pass, whose gradients nobody has bounded."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        for part in inputs:
            self.user_losses(model, part).sum().backward()
        return torch.zeros(())


def test_steps_on_gradients_that_are_not_bounded(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.__class__ = Stolen
    with pytest.raises(DpformerError, match="its batch of users was never passed in"):
        made.train()
    assert made.session.taken == 0


def test_hugging_faces_clipping_would_be_seen(tmp_path: Path) -> None:
    class Clipping(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    with pytest.raises(ValueError, match="was changed since"):
        trainer(tmp_path, callbacks=[Clipping()]).train()


def per_row(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    each = F.cross_entropy(outputs.logits[:, :-1].mT, labels[:, 1:], reduction="none")
    return each.sum(1) / (labels[:, 1:] != -100).sum(1)


def over_the_batch(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """The attack: one number per row, divided by everyone's tokens."""
    each = F.cross_entropy(outputs.logits[:, :-1].mT, labels[:, 1:], reduction="none")
    return each.sum(1) / (labels[:, 1:] != -100).sum()


@pytest.mark.usefixtures("noise_by_step")
def test_losses_of_ones_own(tmp_path: Path) -> None:
    made = trainer(tmp_path / "ours", gpt2().double(), max_steps=1, train_dataset=rows(), compute_loss_func=per_row)
    made.train()
    default = trainer(tmp_path / "default", gpt2().double(), max_steps=1, train_dataset=rows())
    default.train()
    torch.testing.assert_close(weights(made.model), weights(default.model), rtol=1e-9, atol=1e-12)
    with pytest.raises(DpformerError, match="one loss per row"):
        trainer(tmp_path, compute_loss_func=lambda outputs, *_, **__: outputs.logits.mean()).train()


def test_losses_divided_by_everybodys_tokens_are_seen(tmp_path: Path) -> None:
    """Autograd and the engine agree on them, so only a user computed alone shows it."""
    with pytest.raises(dp.UnsupportedUse, match="must depend on that user alone"):
        trainer(tmp_path, train_dataset=rows(users=30), compute_loss_func=over_the_batch).train()


def test_dropout_masks_are_not_from_a_public_seed(tmp_path: Path) -> None:
    """The attack: args.seed is 42 for everybody, so whose presence moves the masks of the others would be seen."""
    sums = []

    class Watching(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            sums.append(model.transformer.h[0].mlp.c_fc.weight.grad.clone())

    for _ in range(2):  # everybody in the batch, so sampling is no difference
        trainer(
            tmp_path, gpt2(dropout=0.5), seed=None, max_steps=1, train_dataset=rows(users=8), callbacks=[Watching()]
        ).train()
    assert not torch.allclose(sums[0], sums[1], rtol=1e-3)


def test_bf16_and_lora_and_a_classifier(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    )
    made = trainer(tmp_path, adapted, max_steps=2, bf16=True)
    before = weights(made.model)
    made.train()
    made.save_model(tmp_path / "adapter")
    moved = {name for name, p in weights(made.model).items() if not torch.equal(p, before[name])}
    assert moved and all("lora" in name for name in moved)
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "library_name: peft" in card and "differential_privacy" in card

    config = transformers.BertConfig(
        vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    examples = [{**row, "labels": len(row["input_ids"]) % 3} for row in rows(most=2)]

    def labelled(some: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {**collate(some), "labels": torch.tensor([one["labels"] for one in some])}

    made = trainer(
        tmp_path, transformers.BertForSequenceClassification(config), max_steps=1, train_dataset=examples,
        data_collator=labelled,
    )  # fmt: skip
    made.train()
    assert made.session.taken == 1


def seq2seq(kind: str) -> Any:
    """A tiny T5 or BART without dropout, in float64."""
    torch.manual_seed(0)
    common = {"vocab_size": 40, "d_model": 16, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    if kind == "T5":
        config = transformers.T5Config(d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0, **common)
        return transformers.T5ForConditionalGeneration(config).double()
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 32))}
    config = transformers.BartConfig(
        dropout=0.0, max_position_embeddings=32, bos_token_id=2, forced_eos_token_id=None, **heads, **sizes, **common
    )
    return transformers.BartForConditionalGeneration(config).double()


@pytest.mark.parametrize("kind", ["T5", "BART"])
def test_an_encoder_and_decoder(kind: str, tmp_path: Path) -> None:
    """The first sum is that of the model's own loss on each user alone, which averages over that user's labels."""
    generator = torch.Generator().manual_seed(0)

    def example(_: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(2, 40, (7,), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones(7, dtype=torch.int64), "labels": ids[:5].flip(0)}

    examples = [example(user) for user in range(24)]
    sums: list[list[torch.Tensor]] = []

    class Watching(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            sums.append([p.grad.clone() for p in model.parameters()])

    made = PrivateTrainer(
        seq2seq(kind), arguments(tmp_path, max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2),
        epsilon=8, delta=0.01, seed=5, train_dataset=examples, users=list(range(24)), callbacks=[Watching()],
        data_collator=lambda rows: {name: torch.stack([row[name] for row in rows]) for name in rows[0]},
    )  # fmt: skip
    made.train()
    model = seq2seq(kind)
    truth = [torch.zeros_like(p) for p in model.parameters()]
    for user in dp.PoissonBatches(24, 8 / 24, 1, seed=5).draw(0):
        loss = model(**{name: value[None] for name, value in examples[user].items()}).loss
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        truth = [total + g / (norm + 0.01) for total, g in zip(truth, grads, strict=True)]
    torch.testing.assert_close(sums[0], truth, rtol=1e-9, atol=1e-12)


def test_tensorboard_gets_nothing_exact(tmp_path: Path) -> None:
    """The Trainer's own reporting, read back by TensorBoard: learning rate and epoch, and no statistic of the data."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for shown in (False, True):
        folder = tmp_path / str(shown)
        made = trainer(folder, report_to="tensorboard", log_loss=shown)
        made.train()
        (written,) = {path.parent for path in folder.rglob("events.out.tfevents.*")}
        events = EventAccumulator(str(written)).Reload()
        found[shown] = set(events.Tags()["scalars"])
        texts = b"".join(path.read_bytes() for path in folder.rglob("events.out.tfevents.*"))
        assert b"input_ids" not in texts and b"author-" not in texts
    assert "train/learning_rate" in found[False]
    assert not [name for name in found[False] if "loss" in name or "grad_norm" in name or "flos" in name]
    assert "train/loss" in found[True]  # asked for
