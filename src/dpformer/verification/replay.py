"""`verify --replay`: the run again, from its secret key, config and data, compared with what was published bit for bit.

A run is a function of (config, data, key): queries, initial weights, sampling, clipping, noise and every step. So
whoever is shown key and data can repeat it, with the code that is installed *here*, and must get the same files:

- the key is the one that the statement commits to, so it was not made up afterwards;
- the released numbers and the weights are those that this code makes of the data: nothing was written into them, no
  step had other noise, other users or another bound than the code says.

What it cannot show: that the key was drawn at random and that only one was tried. It takes as long as the run took.
"""

from __future__ import annotations

import hmac
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpformer.errors import DpformerError
from dpformer.findings import Finding
from dpformer.runs.config import Config
from dpformer.runs.folder import RunFolder
from dpformer.runs.keys import commitment, processor, read_kept_key, save_keys
from dpformer.runs.model_file import load_release, sha256_of
from dpformer.runs.releases_file import load_releases
from dpformer.statement.build import versions
from dpformer.verification.claims import REPLAY

KEY = "key of the run"
IGNORED = {"hashes", "versions"}  # of the statement: compared by themselves, or not at all


class Replay:
    """Repeats a finished run in a folder of its own, which is deleted afterwards.

    Args:
        folder: the run.
        config: of the run, with paths that may be followed and lead to its data.
        facts: the statement.
        data: hash of the data, prepared again.
        key_file: what `dpformer train --key-file` kept.
        run: repeats it: `runs.resume`.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        facts: dict[str, Any],
        data: str,
        key_file: Path,
        run: Callable[[Path], Any],
    ) -> None:
        self.folder, self.config, self.facts, self.data, self.run = folder, config, facts, data, run
        self.kept = read_kept_key(key_file)
        self._refuse_elsewhere()

    def _refuse_elsewhere(self) -> None:
        """Other versions or another processor round otherwise: that would say nothing about the run."""
        stated, here = self.facts["versions"], versions()
        if odd := sorted(name for name in here if stated.get(name) != here[name]):
            raise DpformerError(
                f"this run was made with {odd[0]} {stated.get(odd[0])}, this is {here[odd[0]]}: replay it with that "
                "version"
            )
        if self.kept["processor"] != processor():
            raise DpformerError(
                f"this run was made on {self.kept['processor']}, this is {processor()}, which rounds otherwise: replay "
                "it on such a machine"
            )
        if self.kept["processes"] != 1:
            raise DpformerError(
                f"this run was made by {self.kept['processes']} processes, whose sums round otherwise than those of "
                "one: a run that is to be replayed has to be made by one process"
            )

    def key_of_the_run(self) -> Finding:
        same = hmac.compare_digest(commitment(self.kept["random"]), str(self.facts.get("key_commitment")))
        return Finding(KEY, same, "the one that the statement commits to" if same else "not the key of the statement")

    def replay(self) -> Finding:
        """The files again; whatever differs is named."""
        if not self.key_of_the_run().ok:
            return Finding(REPLAY, False, "not begun: another key gives another model")
        with tempfile.TemporaryDirectory(prefix="dpformer-replay-") as place:
            again = RunFolder.create(Path(place) / "run", self.config.to_toml())
            if "budget" in self.facts and "tuning" not in self.facts:
                again.write_json(again.budget, self.facts["budget"])
            save_keys(again, self.kept["random"], config=self.config.hash(), data=self.data)
            self.run(again.path)
            if "tuning" in self.facts:
                from dpformer.runs.tuning import restate

                restate(again.path, self.facts["tuning"], self.facts.get("budget"))
            wrong = [*self._other_files(again), *self._other_facts(again)]
        if wrong:
            return Finding(REPLAY, False, f"config, data and key give another run: {'; '.join(wrong)}")
        return Finding(REPLAY, True, "config, data and key give the same files, bit for bit")

    def _other_files(self, again: RunFolder) -> list[str]:
        pairs = [(self.folder.model, again.model, _weights), (self.folder.releases, again.releases, load_releases)]
        found = []
        for published, made, read in pairs:
            if published.exists() != made.exists():
                found.append(f"{made.name} is {'not ' * published.exists()}made by it")
            elif made.exists() and sha256_of(published) != sha256_of(made):
                found.append(f"{made.name} differs ({_largest(read(published), read(made))})")
        return found

    def _other_facts(self, again: RunFolder) -> list[str]:
        """Of the statement; files are compared themselves."""
        made = again.read_json(again.statement)
        names = sorted(name for name in (made.keys() | self.facts.keys()) - IGNORED)
        other = [name for name in names if made.get(name) != self.facts.get(name)]
        other += sorted(
            name
            for name in made["hashes"]
            if name != "model" and made["hashes"][name] != self.facts["hashes"].get(name)
        )
        return [f"the statement differs in {', '.join(other)}"] if other else []


def _weights(path: Path) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in load_release(path).model.state_dict().items()}


def _largest(found: dict[str, Any], made: dict[str, Any]) -> str:
    """Where two sets of arrays differ most."""
    import numpy as np

    if found.keys() != made.keys() or any(found[name].shape != made[name].shape for name in made):
        return "in what it holds"
    apart = {name: float(np.abs(found[name].astype(np.float64) - made[name]).max(initial=0.0)) for name in made}
    name = max(apart, key=lambda name: apart[name], default="")
    return f"{name} by up to {apart[name]:.3g}" if name and apart[name] else "in its header"
