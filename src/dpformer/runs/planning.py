"""The plan of a config: steps, noise, and the share of the budget that each query gets."""

from dpformer.accounting.arguments import epsilon_budget
from dpformer.errors import DpformerError
from dpformer.kinds.planning import other_events
from dpformer.runs.config import Config
from dpformer.training.plan import Plan


def make_plan(config: Config, users: int) -> Plan:
    """Calibrates a resolved config for a public number of users."""
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
    """Refuses an ε for which nothing is worked out, before any data is read."""
    try:
        if config.private:
            epsilon_budget(config.epsilon)
    except ValueError as error:
        raise DpformerError(str(error)) from None
