"""The keys of a run in a separate file, and an optimizer whose state contains none.

Trainers write the optimizer's state into checkpoints, and checkpoints get uploaded. The keys of sampling and noise
allow removing the noise, so they are in no checkpoint: each run keeps them in one file, readable by its owner only, in
a separate folder. A checkpoint names the run; loading one looks its keys up. Without that file it cannot be resumed:
steps taken after the checkpoint would be repeated with other noise, without being accounted for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dpformer.errors import DpformerError
from dpformer.files import write_text
from dpformer.sampling import Batch, PoissonBatches
from dpformer.training.optimizer import PrivateOptimizer, refuse_other

FORMAT = 1


class Vault:
    """A folder with one file of keys per run, `<run>.json`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, run: str, secrets: dict[str, Any]) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DpformerError(f"{self.folder} cannot be created for the keys of the run: {error.strerror}") from None
        before = os.umask(0o077)
        try:
            write_text(self.path(run), json.dumps({"format": FORMAT, "run": run, **secrets}))
        finally:
            os.umask(before)

    def read(self, run: str) -> dict[str, Any]:
        path = self.path(run)
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            if facts.pop("format") != FORMAT or facts.pop("run") != run:
                raise ValueError("it belongs to another run or version")
        except FileNotFoundError:
            raise DpformerError(
                f"the keys of this run are not at {path}; without them it cannot be resumed: restore the file"
            ) from None
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise DpformerError(f"{path} does not hold the keys of this run: {error}") from None
        return dict(facts)

    def path(self, run: str) -> Path:
        if not run.isalnum():
            raise DpformerError(f"{run!r} is not the name of a run")
        return self.folder / f"{run}.json"


class VaultOptimizer(PrivateOptimizer):
    """A `PrivateOptimizer` whose `state_dict` contains no key: it names the run, whose keys are in a vault.

    Args:
        inner: the optimizer to step.
        batches: its sampler, whose key is stored and restored too.
        vault: the vault with the keys.
        run: the name of this run.
        data: a digest of the data; resuming with other data is refused.
        masks: the secret of dropout and collators, which loading a state replaces.
        named: the arguments of `PrivateOptimizer`.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        batches: PoissonBatches,
        vault: Vault,
        run: str,
        data: str,
        masks: dict[str, Any],
        **named: Any,
    ) -> None:
        super().__init__(inner, **named)
        self.batches, self.vault, self.run, self.data, self.masks = batches, vault, run, data, masks
        secrets = {"noise": super().state_dict()["random"], "sampling": batches.state_dict()["random"]}
        vault.write(run, {**secrets, "data": data, "masks": masks})
        self.due: Callable[[], Batch | None] = lambda: None
        self.after_step: Callable[[], None] = lambda: None
        self.after_load: Callable[[], None] = lambda: None

    def step(self, batch: Batch | None = None) -> None:  # type: ignore[override]
        """Step on the batch that is due, for trainers that do not pass batches."""
        refuse_other(batch)
        super().step(self.due() if batch is None else batch)
        self.after_step()

    def state_dict(self) -> dict[str, Any]:
        """The inner state, the count, and public facts. No key."""
        state = super().state_dict()
        del state["random"]
        return {**state, "run": self.run, "batches": self._facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where the other left off, with the keys of its run."""
        state = dict(state)
        run, facts = state.pop("run", None), state.pop("batches", None)
        if not isinstance(run, str) or facts is None:
            raise DpformerError("this is not the state of a private run: it does not name the run whose keys it needs")
        for name, value in self._facts().items():
            if facts.get(name) != value:
                raise DpformerError(
                    f"{name} was {facts.get(name)} in the run to resume, but is {value} now: resume with the same data "
                    "and the same arguments"
                )
        secrets = self.vault.read(run)
        if secrets["data"] != self.data:
            raise DpformerError("the training data is not that of the run to resume: restore the original data")
        super().load_state_dict({**state, "random": secrets["noise"]})
        position = {"step": self.steps, "taken": self.steps, "random": secrets["sampling"]}
        self.batches.load_state_dict({**self.batches.state_dict(), **position})
        self.masks.update(secrets["masks"])
        self.run = run
        self.after_load()

    def _facts(self) -> dict[str, Any]:
        return {"n": self.batches.n, "sample_rate": self.batches.sample_rate, "steps": self.batches.steps}
