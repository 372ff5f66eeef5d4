"""One change at a time in the training of a DP network: item rows scaled by popularity, Adam corrected for its noise.

    DPFORMER_DATA=FOLDER python -m experiments.networks ml-1m 5 0 rows=0.25

The setting is that of the paper's tables (`experiments.cells.paper`, vanilla), and one of the changes:

    plain               nothing: the run of the tables again, of which iterates are kept
    bias                released log-frequencies added to the logits (`--frequency-bias`, the default of networks)
    rows=a              E_i = s_i·E'_i with s_i = (p_i / mean p)^a, p the released frequencies (`--row-exponent a`)
    corrected=f         Adam divides by √max((v − ν²)/f, ν²), ν = σC/B the known deviation of the noise (DP-AdamBC)
    rate=r              the learning rate times r
    several, with commas

Frequencies are released and paid for out of the same ε where a change needs them. A run that is stopped goes on where
it was. Results are in docs/results/networks.json; weights of the last epochs in .experiments/networks/.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from experiments.cells import paper
from experiments.store import ROOT, WORK, metrics
from torch import Tensor

from dpformer.data import Dataset
from dpformer.kinds.network import build_model, learning_rate
from dpformer.kinds.ranking import ranker
from dpformer.noise import SecureRandom
from dpformer.queries.released import release_before_training
from dpformer.runs.config import Config
from dpformer.runs.planning import make_plan
from dpformer.runs.tasks import load_dataset
from dpformer.training.gradient_sum import GradientSum, tokens_for
from dpformer.training.plan import Plan
from dpformer.training.trainer import Trainer, dropout_key

STORE = ROOT / "docs" / "results" / "networks.json"
FOLDER = WORK / "networks"
LAST = 10  # epochs whose iterates are kept
SECONDS = 60.0  # between checkpoints


class CorrectedAdam(torch.optim.Optimizer):
    """Adam whose second moment is less the known variance of the noise (DP-AdamBC, Tang et al. 2024).

        p ← p − rate·m̂ / √max((v̂ − ν²)/f, ν²)

    A coordinate without signal moves as with Adam, rate·m̂/ν; where signal is above √f·ν, its size is divided out.
    """

    def __init__(self, parameters: list[Any], *, lr: float, weight_decay: float, noise: float, floor: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "noise": noise, "floor": floor})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, group)

    def _move(self, p: Tensor, group: dict[str, Any]) -> None:
        state, first, second = self.state[p], 0.9, 0.999
        if not state:
            state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        gradient = p.grad + group["weight_decay"] * p
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
        t, noise = int(state["step"]), group["noise"] ** 2
        v = state["exp_avg_sq"] / (1 - second**t)
        divisor = ((v - noise) / group["floor"]).clamp(min=noise).sqrt()
        p.addcdiv_(state["exp_avg"] / (1 - first**t), divisor, value=-group["lr"])


@dataclass
class Run:
    """One run: the trainer, and what is kept of its way."""

    name: str
    config: Config
    plan: Plan
    dataset: Dataset
    trainer: Trainer
    p: Tensor | None
    curve: list[dict[str, Any]] = field(default_factory=list)
    last: list[dict[str, Tensor]] = field(default_factory=list)  # iterates of the last epochs
    seconds: float = 0.0

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.pt"

    def go(self) -> None:
        if self.path.exists():
            self._restore(torch.load(self.path, weights_only=True))
        saved, every = time.monotonic(), 5
        while self.trainer.step < self.plan.steps:
            before = int(self.trainer.step * self.plan.sample_rate + 1e-9)
            step = self.trainer.advance()
            self.seconds += step.seconds
            epoch = int(self.trainer.step * self.plan.sample_rate + 1e-9)
            done = self.trainer.step == self.plan.steps
            if (epoch > before and epoch > self.config.epochs - LAST) or done:  # type: ignore[operator]
                self.last.append({name: p.detach().clone() for name, p in self.trainer.released().state_dict().items()})
            if epoch // every > before // every or done:
                losses = torch.cat([part.losses for part in step.parts])
                self._look(epoch, float(losses.mean()))
            if done or time.monotonic() - saved > SECONDS:
                self._save()
                saved = time.monotonic()

    def _look(self, epoch: int, loss: float) -> None:
        found = metrics(ranker(self.trainer.released()), self.dataset)
        self.curve.append({"epoch": epoch, "training_loss": round(loss, 4), **found})
        print(self.name, epoch, round(100 * found["masked"]["ndcg@10"], 2), round(loss, 3), flush=True)

    def _save(self) -> None:
        state = {
            "trainer": self.trainer.state(), "curve": self.curve, "last": self.last,
            "seconds": self.seconds, "p": self.p, "noise_multiplier": self.plan.noise_multiplier,
        }  # fmt: skip
        part = self.path.with_suffix(".tmp")
        torch.save(state, part)
        part.replace(self.path)

    def _restore(self, state: dict[str, Any]) -> None:
        self.trainer.restore(state["trainer"])
        self.curve, self.last, self.seconds = (state[name] for name in ("curve", "last", "seconds"))


def prepare(data: str, epsilon: float, seed: int, change: str) -> Run:
    """Everything before the first step, as `dpformer train` does it."""
    changes = {name: float(value or 1) for name, _, value in (part.partition("=") for part in change.split(","))}
    config = paper(data, "vanilla", epsilon, seed).config()
    if "rate" in changes:
        config = config.replace(learning_rate=config.learning_rate * changes["rate"])
    dataset = load_dataset(config)
    config = config.resolve(users=dataset.num_users, threads=1)
    config = config.replace(frequency_bias="bias" in changes)
    plan = make_plan(config, dataset.num_users)
    random = SecureRandom("run", seed=seed)
    p = release_before_training(config, plan, dataset, random).frequencies
    model = build_model(config, plan, dataset.num_items, p, random)
    trainer = trainer_of(config, plan, dataset, model, random, changes.get("corrected"))
    return Run(f"{data}-eps{epsilon:g}-{change}-seed{seed}", config, plan, dataset, trainer, p)


def trainer_of(
    config: Config, plan: Plan, dataset: Dataset, model: Any, random: SecureRandom, floor: float | None
) -> Trainer:
    """As `make_trainer`, with another inner optimizer if asked for."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    settings = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    noise = plan.noise_multiplier * plan.clip_norm / plan.expected_batch_size
    adam: torch.optim.Optimizer = (
        torch.optim.Adam(parameters, foreach=True, **settings)
        if floor is None
        else CorrectedAdam(parameters, noise=noise, floor=floor, **settings)
    )
    trainer = Trainer(
        users=dataset,
        batches=plan.sampler(seed=config.seed),
        sum=GradientSum(model, plan.clip, tokens_for(model, config.micro_batch_tokens, dataset.num_items)),
        optimizer=plan.optimizer(adam, context=f"config {config.hash()} data {dataset.hash}", seed=config.seed),
        schedule=partial(learning_rate, config, plan),
        dropout=dropout_key(random),
    )
    trainer.sum.prove(dataset.num_items)
    return trainer


def main(data: str, epsilon: str, seed: str, change: str) -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    run = prepare(data, float(epsilon), int(seed), change)
    run.go()
    found = json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}
    found[run.name] = {
        "epsilon": run.plan.epsilon,
        "noise_multiplier": run.plan.noise_multiplier,
        "learning_rate": run.config.learning_rate,
        "curve": run.curve,
        "seconds": round(run.seconds, 1),
    }
    STORE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
