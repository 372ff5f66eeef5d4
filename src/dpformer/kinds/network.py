"""Networks, which are trained by noisy steps: what all of them have in common."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dpformer.errors import DpformerError
from dpformer.kinds.base import Mechanism, ModelKind

if TYPE_CHECKING:
    from torch import Tensor

    from dpformer.accounting.events import Event
    from dpformer.data import Dataset
    from dpformer.evaluation.rankers import Ranker
    from dpformer.findings import Finding
    from dpformer.models import SequenceModel
    from dpformer.models.vectors import Vectors
    from dpformer.noise import SecureRandom
    from dpformer.runs.config import Config
    from dpformer.runs.model_file import Release
    from dpformer.runs.session import Session
    from dpformer.training.plan import Plan
    from dpformer.training.trainer import Trainer

OF_OWN_NETWORKS = (  # options that a pretrained checkpoint determines
    "dim", "heads", "blocks", "dropout", "norm", "shared", "reattention", "reattention_variant",
    "reattention_scale", "frequency_bias", "frequency_share",
)  # fmt: skip
OF_NETWORKS = (  # options of all trained kinds
    *OF_OWN_NETWORKS, "clipping", "clip_norm", "items_share", "bands", "warm_start", "batch_size", "epochs",
    "learning_rate", "weight_decay", "warmup", "evaluate_every", "micro_batch_tokens", "bf16", "checkpoint_seconds",
)  # fmt: skip
LONGEST = {"recommend": 200, "lm": 256}  # default number of training items or tokens
LONGEST_SYNTHETIC = 50


class NetworkKind(ModelKind):
    """What all networks have in common."""

    # Chosen.

    def default_length(self, config: Config) -> int | None:
        return LONGEST_SYNTHETIC if config.synthetic and config.task == "recommend" else LONGEST[config.task]

    def resolved(self, config: Config, users: int) -> dict[str, Any]:
        batch_size = config.batch_size or max(1, min(1024, users // 4))
        if batch_size > users:
            raise DpformerError(f"batch_size is {batch_size:,}, but there are only {users:,} users: lower it")
        groups = config.noise.groups
        if groups * batch_size > users:
            raise DpformerError(
                f"{config.noise.choice} and batch_size {batch_size:,}: a batch would need {groups * batch_size:,} "
                f"users, but there are {users:,}: lower one of them"
            )
        return {
            "max_length": config.max_length or self.default_length(config),
            "epochs": config.epochs or (10 if config.synthetic else 100),
            "reattention": False if config.reattention is None else config.reattention,
            "batch_size": batch_size,
        }

    # Planned.

    def needs_frequencies(self, config: Config) -> bool:
        return config.frequency_bias

    def without_share(self, config: Config, option: str) -> str:
        if option != "frequency_share":
            return super().without_share(config, option)
        return "frequency_bias needs item frequencies: give frequency_share above 0, or switch it off"

    def mechanism(self, config: Config, users: int, others: tuple[Event, ...]) -> Mechanism:
        """T steps of Poisson batches, with the whole remaining budget."""
        from dpformer.kinds.planning import calibrated

        assert config.batch_size and config.epochs, "resolve the config first"
        # Integers throughout: epochs / q in floating point can be off by one step.
        steps = -(-config.epochs * users // config.batch_size)
        return Mechanism(config.batch_size, steps, calibrated(config, config.batch_size / users, steps, others))

    def estimate(self, config: Config, plan: Plan, items: int) -> dict[str, Any]:
        """Parameters, seconds for all steps if every history has full length, and peak bytes of memory."""
        import numpy as np
        import torch

        from dpformer.data import Dataset
        from dpformer.noise import SecureRandom
        from dpformer.progress import peak_memory
        from dpformer.sampling import Batch

        assert config.max_length is not None and config.threads is not None
        rows = min(int(plan.expected_batch_size), max(1, config.micro_batch_tokens // max(1, config.max_length - 1)))
        histories = np.random.default_rng(0).integers(0, items, (rows, config.max_length))
        dataset = Dataset.from_histories(list(histories), items, max_length=config.max_length)
        frequencies, random = torch.full((items,), min(1.0, config.max_length / items)), SecureRandom("estimate")
        before = torch.get_num_threads()
        torch.set_num_threads(config.threads)
        try:
            with torch.random.fork_rng(devices=[]):
                model = build_model(config, plan, items, frequencies, random)
                trainer = make_trainer(config, plan, dataset, model, random)
                batch = Batch(np.arange(rows), 0, trainer.batches.origin)
                trainer.add_gradients(batch)  # the first call includes self-checks and page faults
                trainer.optimizer.zero_grad(set_to_none=True)
                began = time.monotonic()
                trainer.add_gradients(batch)
                seconds = time.monotonic() - began
        finally:
            torch.set_num_threads(before)
        parameters = sum(p.numel() for p in model.parameters())
        past = 8 * parameters * (len(plan.noise.coefficients()) - 1)  # noise of past steps
        return {
            "parameters": parameters,
            "seconds": seconds / rows * plan.expected_batch_size * plan.steps,
            "memory": peak_memory() + 4 * plan.users * config.max_length + past,
        }

    def effort(self, estimate: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [
            ("parameters", f"{estimate['parameters']:,}"),
            ("time", f"at most {estimate['seconds'] / 60:,.1f} min, if every user fills --max-length"),
            ("memory", f"about {estimate['memory'] / 2**30:.1f} GiB"),
        ]

    # Fitted.

    def build(self, config: Config, num_items: int) -> SequenceModel:
        """The network with random weights, from torch's generator."""
        raise NotImplementedError

    def set_up(self, model: Any, config: Config, plan: Plan, frequencies: Tensor | None) -> None:
        """Set untrained constants from released frequencies; without these, they wait for a state."""
        if frequencies is not None and config.frequency_bias:
            model.set_frequencies(frequencies)

    def fit(self, session: Session) -> Any:
        """Train to the last step."""
        import torch

        from dpformer.training.allocator import freed_memory_kept

        with torch.random.fork_rng(devices=[]), freed_memory_kept():
            trainer = self._trainer(session)
            build = partial(build_assistant, session.config, session.plan, session.users.num_items)
            session.train(trainer, build)
            return trainer.released()

    def _trainer(self, session: Session) -> Trainer:
        from dpformer.models.counts import TransitionCounts
        from dpformer.models.warm_start import low_rank_items
        from dpformer.queries.transitions.query import TRANSITIONS

        config, plan, random = session.config, session.plan, session.random
        model = build_model(config, plan, session.users.num_items, session.released.frequencies, random)
        started = session.released.value(TRANSITIONS)
        if config.warm_start and not session.resuming:
            counts = TransitionCounts.from_release(started, session.attributes)
            model.initialise_items(low_rank_items(counts, model.dim))
        session.continue_earlier(model)
        return session.start(make_trainer(config, plan, session.users, model, random))

    # Ranked.

    def ranker(self, model: Any) -> Ranker:
        from dpformer.evaluation.rankers import NetworkRanker

        return NetworkRanker(model)

    def vectors(self, model: Any, dim: int | None) -> Vectors:
        from dpformer.models.vectors import of_network

        if dim is not None:
            raise ValueError("dim applies to vectors of counts; those of a network have its own: omit it")
        return of_network(model)

    # Verified.

    def constants(self, config: Config, plan: Plan, release: Release) -> Finding:
        import torch

        from dpformer.findings import Finding
        from dpformer.noise.randomness import SecureRandom

        name, arguments = "constants of the model", release.model.arguments
        sizes = {size: getattr(config, size) for size in ("dim", "blocks", "heads") if size in arguments}
        if config.base is None and (odd := [size for size, due in sizes.items() if arguments[size] != due]):
            # Checked before a model with the config's sizes, which may be huge, is built.
            return Finding(name, False, f"{odd[0]} of the model differs from config.toml")
        frequencies = None if release.frequencies is None else torch.from_numpy(release.frequencies)
        with torch.random.fork_rng(devices=[]):
            again = build_model(config, plan, len(release.vocabulary), frequencies, SecureRandom(seed=0))
        found = dict(release.model.named_buffers())
        wrong = [
            key
            for key, buffer in again.named_buffers()
            if key not in found or not torch.allclose(found[key], buffer, rtol=1e-4, atol=1e-6, equal_nan=True)
        ]
        if wrong:
            return Finding(name, False, f"{', '.join(wrong)} do not follow from the releases")
        return Finding(name, True, "follow from the released frequencies and the plan")


def build_model(config: Config, plan: Plan, num_items: int, frequencies: Tensor | None, random: SecureRandom) -> Any:
    """The network with its initial weights, which do not depend on the data except for released frequencies."""
    import torch

    from dpformer.training.device import device_of
    from dpformer.training.trainer import torch_seed

    kind = config.kind
    assert isinstance(kind, NetworkKind)
    torch.manual_seed(torch_seed(random.within("weights")))
    model = kind.build(config, num_items)
    kind.set_up(model, config, plan, frequencies)
    return model.to(device_of(config.device))  # built on the CPU: the same weights for any device


def build_assistant(config: Config, plan: Plan, num_items: int) -> Any:
    """The network of another process, which receives its weights from the leader."""
    from dpformer.noise import SecureRandom

    return build_model(config, plan, num_items, None, SecureRandom("assistant"))


def make_trainer(config: Config, plan: Plan, dataset: Dataset, model: Any, random: SecureRandom) -> Trainer:
    """The trainer for a plan and a network."""
    import torch

    from dpformer.training.gradient_sum import GradientSum, tokens_for
    from dpformer.training.trainer import Trainer, dropout_key

    tokens = tokens_for(model, config.micro_batch_tokens, dataset.num_items)
    parameters = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.Adam(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, foreach=True)
    context = f"config {config.hash()} data {dataset.hash}"
    trainer = Trainer(
        users=dataset,
        batches=plan.sampler(**_secret(config, random, "sampling")),
        sum=GradientSum(model, plan.clip, tokens, config.bf16),
        optimizer=plan.optimizer(adam, context=context, **_secret(config, random, "noise")),
        schedule=partial(learning_rate, config, plan),
        dropout=dropout_key(random),
    )
    if plan.clip is not None:
        trainer.sum.prove(dataset.num_items)
    return trainer


def _secret(config: Config, random: SecureRandom, purpose: str) -> dict[str, Any]:
    """Keys derived from the run's key, so that its owner can repeat the run; or a test's seed."""
    if config.seed is not None:
        return {"seed": config.seed}
    return {"key": random.within(purpose).words(4, step=0).tobytes()}


def learning_rate(config: Config, plan: Plan, step: int) -> float:
    """The learning rate at step 0, 1, …, T − 1."""
    from dpformer.training.schedule import warmup_then_decay

    return config.learning_rate * warmup_then_decay(step, plan.steps, config.warmup)


def common_arguments(config: Config) -> dict[str, Any]:
    """Constructor arguments of our own networks."""
    return {"dim": config.dim, "shared": config.shared, "dropout": config.dropout}
