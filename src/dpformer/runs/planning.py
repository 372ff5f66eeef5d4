"""The plan of a config: steps, noise, and each query's share of the budget; a run's share of a ledger."""

from collections.abc import Sequence

from dpformer.accounting.arguments import epsilon_budget
from dpformer.accounting.events import Event
from dpformer.errors import DpformerError
from dpformer.kinds.planning import other_events
from dpformer.runs.budget import Budget
from dpformer.runs.config import Config
from dpformer.training.plan import Plan


def make_plan(config: Config, users: int) -> Plan:
    """Calibrate a resolved config for a public number of users."""
    check_budget(config)
    others = other_events(config)
    found = config.kind.mechanism(config, users, others)
    assert config.delta, "resolve the config first"
    return Plan(
        users=users,
        expected_batch_size=found.expected_batch_size,
        steps=found.steps,
        epsilon_target=config.epsilon,
        delta=config.delta,
        clip_norm=config.clip_norm,
        noise_multiplier=found.noise_multiplier,
        releases=(*others, *found.events),
        clipping=config.clipping,
        private=config.private and config.seed is None,
        noise=config.noise,
    )


def check_budget(config: Config) -> None:
    """Refuse an ε for which there is no calibration, before any data is read."""
    try:
        if config.private:
            epsilon_budget(config.epsilon)
    except ValueError as error:
        raise DpformerError(str(error)) from None


def with_share_of_delta(config: Config, budget: Budget | None) -> Config:
    """Give a planned run without δ its part of the ledger's δ, so that the failure probabilities of all runs fit."""
    if budget is None or budget.plan is None or config.delta is not None:
        return config
    fields = config.model_fields_set
    found = config.replace(delta=budget.delta / budget.plan)
    found.model_fields_set.intersection_update({*fields, "delta"})  # defaults stay unset
    return found


def with_share(config: Config, budget: Budget, users: int) -> Config:
    """A resolved config whose ε is its share of a ledger's plan."""

    def planned(epsilon: float) -> Sequence[Event]:
        return make_plan(config.replace(epsilon=epsilon), users).events

    if not config.private or config.seed is not None:
        raise DpformerError("a run without noise, or with seeded noise, has no share of a budget")
    return config.replace(epsilon=budget.share(planned))
