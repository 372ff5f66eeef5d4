"""The released file, looked at by `verify`: everything in it has to be explained by the statement.

Tensors and header are listed; constants of the model (what is in it without having been trained) must follow from the
noisy frequencies and the plan; frequencies must be noisy, and paid for in the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from dpformer.privacy.events import Event
from dpformer.privacy.randomness import SecureRandom
from dpformer.training.config import Config
from dpformer.training.plan import Plan
from dpformer.training.release import Release, load_release

METADATA = {"headline", "private", "epsilon", "delta", "versions"}
HEADER = {"format", "model", "arguments", "metadata", "sha256"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: right, wrong, or (None) not to be looked at here."""

    name: str
    ok: bool | None
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ReleasedFile:
    """The checks of `model.safetensors`."""

    def __init__(
        self,
        path: Path,
        config: Config,
        facts: dict[str, Any],
        plan: Callable[[], Plan],
        events: Callable[[], list[Event]],
    ) -> None:
        self.path, self.config, self.facts, self.plan, self.events = path, config, facts, plan, events

    def checks(self) -> Iterator[Callable[[], Finding]]:
        yield self.model_file
        yield self.model_metadata
        yield self.constants
        yield self.frequencies

    @cached_property
    def release(self) -> Release:
        return load_release(self.path)

    def model_file(self) -> Finding:
        """Tensors of the model, vocabulary, titles, frequencies, and one header: nothing else."""
        try:
            with safe_open(self.path, framework="pt") as file:
                header, names = file.metadata() or {}, set(file.keys())
        except (SafetensorError, OSError) as error:
            return Finding("model file", False, " ".join(str(error).split()))
        allowed = {"vocabulary", "titles", "frequencies"}
        extra = sorted(name for name in names if not name.startswith("model.") and name not in allowed)
        extra += sorted(f"header {name}" for name in header.keys() - {"dpformer"})
        extra += sorted(f"header entry {name}" for name in json.loads(header["dpformer"]).keys() - HEADER)
        release = self.release  # refuses what is not exactly the state of the model it names
        known = self.config.catalog is not None or self.config.file is None or self.config.task == "lm"
        if release.titles is not None and not known:
            extra.append("titles (no public catalogue was given)")
        if extra:
            return Finding("model file", False, f"holds what the statement does not cover: {', '.join(extra)}")
        return Finding("model file", True, f"{len(names)} tensors, all of the model, its vocabulary and frequencies")

    def model_metadata(self) -> Finding:
        found = self.release.metadata
        extra = sorted(found.keys() - METADATA - ({"text"} if self.config.task == "lm" else set()))
        if extra:
            return Finding(
                "metadata of the model", False, f"holds {', '.join(extra)}, which the statement does not cover"
            )
        wrong = sorted(name for name in METADATA if found.get(name) != self.facts.get(name))
        return Finding(
            "metadata of the model", not wrong, f"differs from the statement in {', '.join(wrong)}" if wrong else ""
        )

    def constants(self) -> Finding:
        """What is in the model without having been trained must follow from what was released with noise."""
        if self.config.model == "counts":
            return Finding("constants of the model", None, "a model of counts has none")
        from dpformer.training.start import build_model

        release = self.release
        frequencies = None if release.frequencies is None else torch.from_numpy(release.frequencies)
        with torch.random.fork_rng(devices=[]):
            again = build_model(self.config, self.plan(), len(release.vocabulary), frequencies, SecureRandom(seed=0))
        found = dict(release.model.named_buffers())
        wrong = [
            name
            for name, buffer in again.named_buffers()
            if name not in found or not torch.allclose(found[name], buffer, rtol=1e-4, atol=1e-6, equal_nan=True)
        ]
        if wrong:
            return Finding("constants of the model", False, f"{', '.join(wrong)} do not follow from what was released")
        return Finding("constants of the model", True, "follow from the released frequencies and the plan")

    def frequencies(self) -> Finding:
        """Frequencies are covered if an event paid for them, and noisy: counts of users are whole numbers."""
        frequencies = self.release.frequencies
        if frequencies is None:
            return Finding("frequencies", True, "none released")
        if not self.config.private:
            return Finding("frequencies", None, "exact: the run is not private")
        if not any(event.label in ("frequencies", "transition counts") for event in self.events()):
            return Finding("frequencies", False, "released, but the ledger holds no event for them")
        counts = frequencies * self.facts["users"]
        whole = np.abs(counts - np.round(counts)) < 1e-6
        if float(whole[counts > 1.5].mean() if (counts > 1.5).any() else 0) > 0.5:
            return Finding("frequencies", False, "look like exact counts of users")
        return Finding("frequencies", True, "noisy, and accounted for")
