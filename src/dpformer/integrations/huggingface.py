"""`PrivateTrainer`: Hugging Face's Trainer with user-level differential privacy.

    trainer = PrivateTrainer(model, args, train_dataset=texts, data_collator=collator, epsilon=8, users="author")
    trainer.train()
    trainer.save_model("model")     # includes privacy.json and a model card

What is replaced:

| Trainer | here |
| --- | --- |
| shuffled batches of examples | Poisson batches of users, each included with the same probability |
| one loss for the batch, scaled by its tokens | one loss per user, whose gradient is clipped by `clipping` |
| max_grad_norm | off: it would bound the sum over users instead of each user |
| optimizer.step | adds the noise once, then steps the optimizer named by `args` |
| optimizer.pt | contains no keys; they are in a sibling folder, where resuming finds them |
| loss and grad_norm in logs | omitted, because they are exact statistics of the data; `log_loss=True` shows the loss |

Evaluation, schedules, callbacks, checkpoints and everything else are Trainer's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpformer.accounting.ledger import Ledger
from dpformer.clipping.clip_functions import ClipFunction
from dpformer.errors import DpformerError, MissingExtra
from dpformer.integrations.batches import LogicalBatch, LogicalBatches, Part, only
from dpformer.integrations.losses import kind_of, user_losses, with_decoder_inputs
from dpformer.integrations.session import PrivateSession
from dpformer.integrations.users import Users
from dpformer.statement.cards import write_card

try:
    from transformers import Trainer, TrainingArguments
except ImportError:
    raise MissingExtra("transformers", "hf") from None

REFUSED: dict[str, tuple[Any, str]] = {  # argument → required value, and why
    "fp16": (False, "its scaling of gradients would change what is clipped: use bf16"),
    "gradient_checkpointing": (False, "layers would run again without recording their uses: reduce the batch"),
    "torch_compile": (False, "uses of parameters cannot be seen in compiled code"),
    "use_liger_kernel": (False, "its fused kernels have no exact rule"),
    "neftune_noise_alpha": (None, "its noise depends on the longest text in the batch, which mixes users"),
    "auto_find_batch_size": (False, "the batch size determines the noise, so it must be set in advance"),
    "deepspeed": (None, "it exchanges gradients between processes before they are clipped"),
}


class PrivateTrainer(Trainer):
    """Hugging Face's Trainer with user-level differential privacy.

    Args:
        model: any model of transformers, or of peft.
        args: as without privacy. The expected number of users per step is per_device_train_batch_size times
            gradient_accumulation_steps; at most the former, in examples, are computed at once.
        epsilon: ε of the whole run.
        delta: δ of the whole run; by default 1 / (10 · number of users).
        train_dataset: one user per item, which is one example or a list; or, with `users`, one example per item.
        users: the user of each example: the name of a column, or a sequence of ids.
        unit: the unit of privacy in the statement: user, author, document. By default user if `users` is given, and
            example otherwise.
        clipping: the clip function: `dp.normalize(C)`, the default with C = 1, or `dp.clip(C)`.
        keys: the folder for the keys of the run; by default `args.output_dir` with the suffix `.keys`.
        log_loss: show the exact training loss in logs, which makes them as private as the data.
        seed: for tests only: marks the run as not private. It is unrelated to `args.seed`.
        others: other arguments of Trainer. `compute_loss_func` must return one loss per row.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        epsilon: float,
        delta: float | None = None,
        train_dataset: Any,
        users: str | Sequence[Any] | None = None,
        unit: str | None = None,
        clipping: ClipFunction | None = None,
        keys: str | Path | None = None,
        log_loss: bool = False,
        seed: int | None = None,
        **others: Any,
    ) -> None:
        if others.get("model_init") is not None:
            raise DpformerError("model_init creates a new model for every trial, each with its own budget: give model")
        if type(self).compute_loss is not Trainer.compute_loss:
            raise DpformerError(
                f"{type(self).__name__} overrides compute_loss, which private training never calls, because it returns "
                "one loss for the whole batch: override user_losses(model, part), one loss per user, or give "
                "compute_loss_func, one loss per row"
            )
        self.log_loss = log_loss
        people = Users(train_dataset, users)
        batch_size = args.train_batch_size * args.gradient_accumulation_steps
        self._steps_per_epoch = math.ceil(len(people) / batch_size)
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * self._steps_per_epoch)
        super().__init__(model, _arguments(args), train_dataset=train_dataset, **others)
        _refuse_several(self)
        self.session = PrivateSession(
            model,
            people,
            epsilon=epsilon,
            delta=delta,
            batch_size=batch_size,
            steps=steps,
            clipping=clipping,
            unit=unit,
            keys=Path(f"{Path(str(args.output_dir))}.keys" if keys is None else keys),
            data=[_description(users, args)],
            seed=seed,
        )
        if hasattr(model, "save_pretrained"):
            model.save_pretrained = _SavesStatement(model.save_pretrained, self.session)  # type: ignore[assignment,arg-type]

    @property
    def ledger(self) -> Ledger:
        """Everything done so far, for `ledger.epsilon(delta)`."""
        return self.session.ledger

    @property
    def statement(self) -> dict[str, Any]:
        """The statement about the current model."""
        return self.session.statement()

    # Batches of users.

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[LogicalBatch]:
        data = self.session.logical_batches(
            self._get_collator_with_removed_columns(self.data_collator, description="training"),
            self.args.train_batch_size,
            self._pad_token(),
        )
        return _Loader(
            data,
            batch_sampler=_StepsOfEpoch(data, self._steps_per_epoch),
            collate_fn=only,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def _pad_token(self) -> int:
        knowing = (self.processing_class, getattr(self.data_collator, "tokenizer", None))
        known = [getattr(one, "pad_token_id", None) for one in (*knowing, getattr(self.model, "config", None))]
        return next((int(number) for number in known if number is not None), 0)

    def num_examples(self, dataloader: Any) -> int:
        return (
            len(self.session.users)
            if isinstance(dataloader.dataset, LogicalBatches)
            else super().num_examples(dataloader)
        )

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        return None  # the number of tokens over all users must not scale the loss of one user

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # the number of tokens in a batch is private

    def _track_num_input_tokens(self, inputs: Any) -> None:
        return None

    # The step.

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Add the clipped sums of all parts of a batch to `p.grad`."""
        model.train()
        total = torch.zeros((), device=self.args.device)
        for part in self.session.due(inputs):
            part = part.to(self.args.device)
            total += self.session.add(partial(self._losses, model), part, self.args.device).nansum()
        return total / self.session.batch_size if self.log_loss else total.new_zeros(())

    def _losses(self, model: nn.Module, part: Part) -> Tensor:
        with self.compute_loss_context_manager():
            return self.user_losses(model, part)

    def user_losses(self, model: nn.Module, part: Part) -> Tensor:
        """(B,): one loss per user. Override it if the model's kind of loss is not supported."""
        if self.compute_loss_func is None:
            return user_losses(model, part, self.args.label_smoothing_factor)
        inputs = dict(part.inputs)
        labels = inputs.pop("labels", None)
        losses = self.compute_loss_func(
            model(**with_decoder_inputs(model, inputs, labels)), labels, num_items_in_batch=None
        )
        if losses.shape != (part.real.numel(),):
            raise DpformerError(
                f"compute_loss_func returns a tensor of shape {tuple(losses.shape)} for {part.real.numel()} rows; it "
                "must return one loss per row, from that row alone: reduction='none', then a mean over positions"
            )
        return part.mean(losses)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.session.optimizer is None:
            facts = f"{kind_of(self.session.model)} smoothing {self.args.label_smoothing_factor}"
            self.optimizer = self.session.make_optimizer(super().create_optimizer(model), facts)
        assert self.optimizer is not None
        return self.optimizer  # the second time, wrapped by Accelerate

    def _clip_grad_norm(self, model: nn.Module) -> None:
        return None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        return None  # the norm before noise is an exact statistic of the data

    def train(self, resume_from_checkpoint: Any = None, *given: Any, **named: Any) -> Any:
        if self.session.taken and not resume_from_checkpoint:
            raise DpformerError(
                f"this trainer has taken {self.session.taken} steps of its budget; resume from a checkpoint, or create "
                "another trainer, whose ε is additional"
            )
        return super().train(resume_from_checkpoint, *given, **named)

    def hyperparameter_search(self, *given: Any, **named: Any) -> Any:
        raise DpformerError("each trial spends its own budget, and no ledger would add them up: see dpformer tune")

    # What is shown and saved.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self.log_loss:
            for name in ("loss", "train_loss", "total_flos"):
                logs.pop(name, None)
        super().log(logs, start_time)

    def _finalize_training(self, *given: Any, **named: Any) -> Any:
        done = super()._finalize_training(*given, **named)
        return done if self.log_loss else done._replace(training_loss=math.nan)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.session.know_weights()

    def create_model_card(self, *given: Any, **named: Any) -> None:
        """Write our card; Trainer's would show training losses."""
        if self.session.taken:
            write_card(Path(str(self.args.output_dir)), self.statement, library=_library(self.session.model))


class _SavesStatement:
    """`model.save_pretrained`, which also writes statement and card."""

    def __init__(self, save: Callable[..., Any], session: PrivateSession) -> None:
        self.save, self.session = save, session

    def __call__(self, save_directory: str | Path, **named: Any) -> Any:
        if self.session.taken:
            self.session.check_weights()
        done = self.save(save_directory, **named)
        if self.session.taken:
            write_card(Path(save_directory), self.session.statement(), library=_library(self.session.model))
        return done


class _StepsOfEpoch:
    """The steps of an epoch, one at a time."""

    def __init__(self, data: LogicalBatches, each: int) -> None:
        self.data, self.each, self.epoch = data, each, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        first = self.epoch * self.each
        return iter([step] for step in range(first, min(first + self.each, len(self.data))))

    def __len__(self) -> int:
        return self.each


class _Loader(torch.utils.data.DataLoader[LogicalBatch]):
    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def _arguments(args: TrainingArguments) -> TrainingArguments:
    """A copy in which a batch of Trainer's is one step of ours, and nothing else touches the gradients."""
    for name, (allowed, why) in REFUSED.items():
        if getattr(args, name, allowed) not in (allowed, None):
            raise DpformerError(f"{name}={getattr(args, name)!r} cannot be private here: {why}")
    if args.max_grad_norm not in (0, 1.0, None):
        raise DpformerError(
            f"max_grad_norm={args.max_grad_norm} would bound the sum of all users; bound each user with "
            f"clipping=dp.clip({args.max_grad_norm})"
        )
    args = copy.copy(args)
    args.gradient_accumulation_steps, args.max_grad_norm = 1, 0.0
    return args


def _refuse_several(trainer: Trainer) -> None:
    if trainer.args.world_size > 1 or trainer.args.n_gpu > 1 or trainer.is_fsdp_enabled:
        raise DpformerError(
            f"PrivateTrainer runs on one device, but there are {max(trainer.args.world_size, trainer.args.n_gpu)}: "
            "Trainer would add gradients before they are clipped. For several processes see "
            "docs/guide/several-machines.md; to select one of several GPUs, set CUDA_VISIBLE_DEVICES=0"
        )


def _library(model: nn.Module) -> str:
    return "peft" if hasattr(model, "get_base_model") else "transformers"


def _description(users: str | Sequence[Any] | None, args: TrainingArguments) -> str:
    whose = (
        "Each item of the data set is one unit of privacy"
        if users is None
        else f"All examples with the same {users if isinstance(users, str) else 'user id'} are one user"
    )
    chosen = args.load_best_model_at_end or str(getattr(args.save_strategy, "value", args.save_strategy)) == "best"
    return f"{whose}." + (" Which checkpoint is kept was chosen by metrics on evaluation data." if chosen else "")
