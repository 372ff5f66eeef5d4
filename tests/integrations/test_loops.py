"""Accelerate and Lightning: the same model as a loop of the library, exact resume, no key in checkpoints, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dpformer as dp
from dpformer.errors import DpformerError
from dpformer.integrations.batches import Part
from dpformer.integrations.losses import user_losses
from dpformer.integrations.users import Users
from tests.integrations.secrets import a_leak_is_found, no_secret_in
from tests.integrations.texts import collate, gpt2, rows

pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
from dpformer.integrations.accelerate import PrivateLoop, make_private  # noqa: E402

BUDGET: dict[str, Any] = {"epsilon": 8, "batch_size": 8, "steps": 4, "collate": collate, "by": "author"}


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def library_loop(examples: list[dict[str, Any]], context: str) -> tuple[Any, dp.Ledger]:
    """Without any trainer, in other parts."""
    model, people = gpt2().double(), Users(examples, "author")
    n, q = len(people), 8 / len(people)
    sigma = dp.calibrate(epsilon=8, delta=1 / (10 * n), sample_rate=q, steps=4)
    clipping, batches = dp.PhantomClipping(model), dp.PoissonBatches(n, q, 4, seed=5)
    optimizer = dp.PrivateOptimizer(
        adam(model), noise_multiplier=sigma, clip_norm=1.0, expected_batch_size=q * n, context=context, seed=5
    )
    for batch in batches:
        for part in batch.split(1):
            with clipping.users(Part.of([collate(people[int(part.users)])]), part) as user:
                loss = user_losses(model, user)
            clipping.backward(loss, dp.normalize(1.0))
        optimizer.step(batch)
        optimizer.zero_grad()
    return model, dp.Ledger(optimizer.events())


def run(private: PrivateLoop, steps: int = 4) -> None:
    for batch in private:
        for part in batch:
            private.backward(lambda part: user_losses(private.model, part), part)
        private.step()
        if private.session.taken == steps:
            return


def loop(folder: Path, model: Any = None, **changes: Any) -> PrivateLoop:
    model = gpt2().double() if model is None else model
    given = {**BUDGET, "users": rows(most=2), "keys": folder / "keys", "seed": 5, **changes}
    return make_private(accelerate.Accelerator(cpu=True), model, adam(model), **given)


def no_key_in(folder: Path, saved: str) -> None:
    """In no file; and if one were in the file of the optimizer, it would be found."""
    (vault,) = (folder / "keys").iterdir()
    read = no_secret_in(folder, vault)
    assert folder / saved in read
    a_leak_is_found(folder, vault, folder / saved)


@pytest.mark.usefixtures("noise_by_step")
def test_accelerate_is_the_loop_of_the_library(tmp_path: Path) -> None:
    private = loop(tmp_path)
    run(private)
    model, ledger = library_loop(rows(most=2), private.session.context)
    assert private.session.ledger == ledger
    torch.testing.assert_close(
        dict(private.model.named_parameters()), dict(model.named_parameters()), rtol=0, atol=1e-9
    )


def test_accelerate_resumes_and_saves_no_key(tmp_path: Path) -> None:
    private = loop(tmp_path, gpt2(dropout=0.1), seed=None)
    run(private, 2)
    private.accelerator.save_state(str(tmp_path / "state"))
    run(private)
    private.model.save_pretrained(tmp_path / "model")
    no_key_in(tmp_path, "state/optimizer.bin")
    again = loop(tmp_path, gpt2(seed=1, dropout=0.1), seed=None)
    again.accelerator.load_state(str(tmp_path / "state"))
    assert again.session.taken == 2
    run(again)
    for ours, theirs in zip(again.model.parameters(), private.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_accelerates_own_backward_is_refused(tmp_path: Path) -> None:
    private = loop(tmp_path)
    with pytest.raises(ValueError, match="is not a sum that PhantomClipping has bounded"):
        for batch in private:
            for part in batch:
                private.accelerator.backward(user_losses(private.model, part).mean())
            private.step()


def test_a_batch_without_its_step_is_refused(tmp_path: Path) -> None:
    batches = iter(loop(tmp_path))
    next(batches)
    with pytest.raises(DpformerError, match="step once after each batch"):
        next(batches)


def test_a_part_made_by_hand_is_refused(tmp_path: Path) -> None:
    """The data of one user under the names of all users of a part: that user counted as many times."""
    private = loop(tmp_path)
    for batch in private:
        for part in batch:
            same = Part.of([part.collated[0]] * part.users, part.pad_token, part.who)
            with pytest.raises(DpformerError, match="made by hand"):
                private.backward(lambda part: user_losses(private.model, part), same)
        break
    assert private.session.taken == 0


def module(folder: Path, model: Any = None, **changes: Any) -> Any:
    lightning = pytest.importorskip("lightning")
    from dpformer.integrations.lightning import Private

    class Model(Private, lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.body = gpt2().double() if model is None else model

        def user_losses(self, part: Part) -> torch.Tensor:
            return user_losses(self.body, part)

        def configure_optimizers(self) -> Any:
            return self.private(adam(self)) if changes.get("wrapped", True) else adam(self)

    made = Model()
    budget = {name: value for name, value in changes.items() if name != "wrapped"}
    made.make_private(rows(most=2), **{**BUDGET, "keys": folder / "keys", "seed": 5, **budget})
    return made


def fit(made: Any, folder: Path, resume: Path | None = None, **named: Any) -> Any:
    lightning = pytest.importorskip("lightning")
    given = {"max_steps": 4, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        default_root_dir=folder, enable_model_summary=False, enable_checkpointing=False, **{**given, **named}
    )
    trainer.fit(made, ckpt_path=resume, **({} if resume is None else {"weights_only": True}))
    return trainer


@pytest.mark.usefixtures("noise_by_step")
def test_lightning_is_the_loop_of_the_library(tmp_path: Path) -> None:
    made = module(tmp_path)
    trainer = fit(made, tmp_path)
    assert trainer.global_step == 4
    model, ledger = library_loop(rows(most=2), made.session.context)
    assert made.session.ledger == ledger
    torch.testing.assert_close(dict(made.body.named_parameters()), dict(model.named_parameters()), rtol=0, atol=1e-9)


def test_lightning_resumes_and_saves_no_key(tmp_path: Path) -> None:
    made = module(tmp_path, gpt2(dropout=0.1), seed=None)
    halfway = fit(made, tmp_path, max_steps=2)
    halfway.save_checkpoint(tmp_path / "half.ckpt")
    made.body.save_pretrained(tmp_path / "model")
    no_key_in(tmp_path, "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert saved["privacy"]["steps"] == 2 and saved["privacy"]["private"]
    whole = []
    for _ in range(2):
        again = module(tmp_path, gpt2(seed=1, dropout=0.1), seed=None)
        fit(again, tmp_path, tmp_path / "half.ckpt")
        assert again.session.taken == 4
        assert again.trainer.global_step == 4
        whole.append([p.detach().clone() for p in again.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*whole, strict=True))


@pytest.mark.parametrize(
    ("changes", "trainer", "says"),
    [
        ({"wrapped": False}, {}, "self.private"),
        ({}, {"gradient_clip_val": 1.0}, "sums of clipped gradients"),
        ({}, {"accumulate_grad_batches": 2}, "sums of clipped gradients"),
        ({}, {"max_steps": 5}, "give max_steps=4"),
    ],
)
def test_lightning_refuses(changes: dict[str, Any], trainer: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DpformerError, match=says):
        fit(module(tmp_path, **changes), tmp_path, **trainer)


@pytest.mark.parametrize("adapter", ["accelerate", "lightning"])
def test_a_model_that_was_changed_after_its_last_step_gets_no_statement(adapter: str, tmp_path: Path) -> None:
    """Epochs of plain training after the private ones were in the checkpoint, beside the statement."""
    if adapter == "accelerate":
        private = loop(tmp_path)
        run(private)
        session, model = private.session, private.model
    else:
        made = module(tmp_path)
        trainer = fit(made, tmp_path)
        trainer.save_checkpoint(tmp_path / "fine.ckpt")
        session, model = made.session, made.body
    assert session.statement()["steps"] == 4
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(DpformerError, match="weights were changed after the last private step"):
        session.statement()
    if adapter == "lightning":
        with pytest.raises(DpformerError, match="weights were changed"):
            trainer.save_checkpoint(tmp_path / "changed.ckpt")


def existing_module(folder: Path, calls: int) -> Any:
    """A module with a training_step of its own, as every existing one has; it may call ours."""
    lightning = pytest.importorskip("lightning")
    made = module(folder)
    ours = type(made)

    class Existing(ours):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for _ in range(calls):
                super().training_step(batch, batch_idx)
            return torch.zeros((), requires_grad=True)

    made.__class__ = Existing
    assert isinstance(made, lightning.LightningModule)
    return made


def test_a_training_step_of_ones_own_does_not_train_on_noise_alone(tmp_path: Path) -> None:
    """It did, and got a statement for a model that had learnt nothing."""
    made = existing_module(tmp_path, calls=0)
    with pytest.raises(DpformerError, match="trains on pure noise"):
        fit(made, tmp_path)
    assert made.session.taken == 0
    made = existing_module(tmp_path / "twice", calls=2)
    with pytest.raises(ValueError, match="in the sum of step 1 already"):
        fit(made, tmp_path)
    assert made.session.taken == 0
    fit(existing_module(tmp_path / "once", calls=1), tmp_path)


def test_a_module_without_user_losses_is_refused_before_it_starts(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from dpformer.integrations.lightning import Private

    class Plain(Private, lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.body = gpt2()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.body(**batch).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return self.private(adam(self))

    made = Plain()
    made.make_private(rows(most=2), **{**BUDGET, "keys": tmp_path / "keys"})
    with pytest.raises(DpformerError, match="define user_losses"):
        fit(made, tmp_path)


@pytest.mark.parametrize("adapter", ["accelerate", "lightning"])
def test_without_ids_the_guarantee_is_for_examples(adapter: str, tmp_path: Path) -> None:
    made = (loop if adapter == "accelerate" else module)(tmp_path, by=None)
    assert made.session.unit.name == "example"


@pytest.mark.parametrize("adapter", ["accelerate", "lightning"])
@pytest.mark.parametrize("begins", [0, 2])
def test_users_mixed_through_numbers(
    adapter: str, begins: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: losses weighted by everybody's, which no gradient shows; at once, or from the third step."""
    monkeypatch.setattr("dpformer.clipping.isolation.EVERY", 1)

    def weighted(model: Any, part: Part, taken: int) -> torch.Tensor:
        each = user_losses(model, part)
        return each / each.detach().mean() if taken >= begins else each

    with pytest.raises(dp.UnsupportedUse, match="must depend on that user alone"):
        if adapter == "accelerate":
            private = loop(tmp_path)
            session = private.session
            for batch in private:
                for part in batch:
                    private.backward(lambda part: weighted(private.model, part, session.taken), part)
                private.step()
        else:
            made = module(tmp_path)
            session = made.session
            made.user_losses = lambda part: weighted(made.body, part, session.taken)
            fit(made, tmp_path)
    assert session.taken == begins
