"""`verify --replay`: repeat the run from its secret key, config and data, and compare the files bit for bit.

A run is a function of (config, data, key): queries, initial weights, sampling, clipping, noise and every step. So
anyone who is given key and data can repeat it with the code installed *here*, and must get the same files:

- the key is the one to which the statement commits, so it was not invented afterwards;
- the released numbers and the weights are those that this code computes from the data: nothing was written into them,
no step had other noise, other users or another bound.

It cannot show that the key was drawn at random and that only one was tried. It takes as long as the run.
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
IGNORED = {"hashes", "versions"}  # fields of the statement that are compared separately, or not at all


class Replay:
    """Repeats a finished run in a temporary folder.

    Args:
        folder: the run.
        config: the config of the run, with trusted paths to its data.
        facts: the statement.
        data: hash of the data, prepared again.
        key_file: the file written by `dpformer train --key-file`.
        run: the function that repeats it: `runs.resume`.
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
        """Other versions or another processor round differently, which would say nothing about the run."""
        stated, here = self.facts["versions"], versions()
        if odd := sorted(name for name in here if stated.get(name) != here[name]):
            raise DpformerError(
                f"this run was made with {odd[0]} {stated.get(odd[0])}, but {here[odd[0]]} is installed: replay it "
                "with the same version"
            )
        if self.kept["processor"] != processor():
            raise DpformerError(
                f"this run was made on {self.kept['processor']}, and {processor()} rounds differently: replay it on "
                "such a machine"
            )
        if self.kept["processes"] != 1:
            raise DpformerError(
                f"this run was made by {self.kept['processes']} processes, whose sums round differently than those of "
                "one: only runs of a single process can be replayed"
            )

    def key_of_the_run(self) -> Finding:
        same = hmac.compare_digest(commitment(self.kept["random"]), str(self.facts.get("key_commitment")))
        return Finding(
            KEY,
            same,
            "matches the commitment in the statement" if same else "does not match the commitment in the statement",
        )

    def replay(self) -> Finding:
        """Compare the files of the repeated run; differences are named."""
        if not self.key_of_the_run().ok:
            return Finding(REPLAY, False, "not started: another key gives another model")
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
            return Finding(REPLAY, False, f"config, data and key give a different run: {'; '.join(wrong)}")
        return Finding(REPLAY, True, "config, data and key give the same files, bit for bit")

    def _other_files(self, again: RunFolder) -> list[str]:
        pairs = [(self.folder.model, again.model, _weights), (self.folder.releases, again.releases, load_releases)]
        found = []
        for published, made, read in pairs:
            if published.exists() != made.exists():
                found.append(f"{made.name} is {'not ' * published.exists()}created by it")
            elif made.exists() and sha256_of(published) != sha256_of(made):
                found.append(f"{made.name} differs ({_largest(read(published), read(made))})")
        return found

    def _other_facts(self, again: RunFolder) -> list[str]:
        """Differences of the statement; files are compared separately."""
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
        return "in its contents"
    apart = {name: float(np.abs(found[name].astype(np.float64) - made[name]).max(initial=0.0)) for name in made}
    name = max(apart, key=lambda name: apart[name], default="")
    return f"{name} by up to {apart[name]:.3g}" if name and apart[name] else "in its header"
