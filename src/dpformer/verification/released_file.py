"""The released file, looked at by `verify`: everything in it has to be explained by the statement.

Tensors and header are listed; constants of the model (what is in it without having been trained) must follow from the
noisy frequencies and the plan; frequencies, counts and metrics must be noisy, and paid for in the ledger.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from dpformer.accounting.events import METRICS, Event, Gaussian
from dpformer.data import Dataset, Vocabulary
from dpformer.data.attributes import Attributes
from dpformer.data.tokens import Tokens
from dpformer.evaluation.evaluate import served_ranks
from dpformer.files import strict_json
from dpformer.models.counts import ROW_PRIOR, TransitionCounts
from dpformer.noise.randomness import SecureRandom
from dpformer.queries.metrics import ALARM, MetricRelease
from dpformer.runs.config import Config
from dpformer.runs.model_file import Release, load_release, sha256_of
from dpformer.runs.tasks import task_of
from dpformer.training.plan import Plan
from dpformer.verification.findings import Finding

METADATA = {"headline", "private", "epsilon", "delta", "versions"}
HEADER = {"format", "model", "arguments", "metadata", "sha256"}
FEW = 20  # counts: with as many, an honest run looks exact with chance 10⁻⁸


class ReleasedFile:
    """The checks of `model.safetensors`."""

    def __init__(
        self,
        path: Path,
        config: Config,
        facts: dict[str, Any],
        plan: Callable[[], Plan],
        events: Callable[[], list[Event]],
        catalog: Vocabulary | None,
    ) -> None:
        self.path, self.config, self.facts, self.plan, self.events = path, config, facts, plan, events
        self.catalog = catalog

    def checks(self) -> Iterator[Callable[[], Finding]]:
        yield self.the_very_file
        yield self.model_file
        yield self.titles
        yield self.model_metadata
        yield self.constants
        yield self.frequencies

    @cached_property
    def release(self) -> Release:
        return load_release(self.path)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary([str(item) for item in self.release.vocabulary], policy="dp")

    @property
    def items(self) -> int:
        return len(self.release.vocabulary)

    def the_very_file(self) -> Finding:
        """Every bit of the file is that of the statement: other weights, or a count times 1.01, are another file."""
        name = "hash of the model"
        if not self.path.is_file():
            return Finding(name, False, "model.safetensors is not here: there is nothing that the statement is about")
        same = hmac.compare_digest(str(self.facts["hashes"].get("model")), sha256_of(self.path))
        return Finding(name, same, "" if same else "model.safetensors is not the file of the statement")

    def titles(self) -> Finding:
        """Titles are public where they come from: the given catalogue, or the characters of a language model."""
        titles, name = self.release.titles, "titles"
        if titles is None:
            return Finding(name, True, "none")
        if self.config.task == "lm":
            due = self._tokens().vocabulary.titles
            same = list(due or ()) == titles
            return Finding(name, same, "the tokens of the config" if same else "are not the tokens of the config")
        if self.catalog is None:
            return Finding(name, None, "not compared: the catalogue was not given")
        known = dict(zip(self.catalog.ids, self.catalog.titles or [""] * len(self.catalog), strict=True))
        wrong = [t for i, t in zip(self.release.vocabulary, titles, strict=True) if known.get(str(i)) != t]
        return Finding(name, not wrong, f"{wrong[0]!r} is not in the catalogue" if wrong else "those of the catalogue")

    def attributes(self) -> Attributes | None:
        """Those of the public catalogue, for the items of the model; None where none was given, or it has none."""
        catalog = self.catalog
        if catalog is None or catalog.attributes is None or not self.config.attributes:
            return None
        return catalog.attributes.of_rows(catalog.match([str(item) for item in self.release.vocabulary]))

    def _tokens(self) -> Tokens:
        """The vocabulary of text: of the config's characters, or of the tokenizer in the file itself."""
        if self.config.tokenizer is None and self.config.base is None:
            return Tokens.of_characters(self.config.characters or "ascii")
        return Tokens.from_json(self.release.metadata["text"]["tokenizer"])

    def sentence_on_tokens(self) -> str:
        return self._tokens().description if self.config.task == "lm" else ""

    def model_file(self) -> Finding:
        """Tensors of the model, vocabulary, titles, frequencies, and one header: nothing else."""
        if not self.path.is_file():  # a named pipe would be waited for
            return Finding("model file", False, "model.safetensors is not a file")
        try:
            with safe_open(self.path, framework="pt") as file:
                header, names = file.metadata() or {}, set(file.keys())
            strict_json(_raw_header(self.path))
        except (SafetensorError, OSError, ValueError) as error:
            return Finding("model file", False, " ".join(str(error).split()))
        allowed = {"vocabulary", "titles", "frequencies"}
        if getattr(self.release.model, "num_attributes", 0) and self.config.items_policy == "catalog":
            allowed.add("attributes")
        extra = sorted(name for name in names if not name.startswith("model.") and name not in allowed)
        extra += sorted(f"header {name}" for name in header.keys() - {"dpformer"})
        extra += sorted(f"header entry {name}" for name in json.loads(header["dpformer"]).keys() - HEADER)
        release = self.release  # refuses what is not exactly the state of the model it names
        if release.titles is not None and self.config.items_policy != "catalog":
            extra.append("titles (no public catalogue was given)")
        if extra:
            return Finding("model file", False, f"holds what the statement does not cover: {', '.join(extra)}")
        return Finding("model file", True, f"{len(names)} tensors, all of the model, its vocabulary and frequencies")

    def model_metadata(self) -> Finding:
        found = self.release.metadata
        extra = sorted(found.keys() - METADATA - task_of(self.config).metadata_keys)
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
            return self._transition_counts()
        from dpformer.runs.prepare_training import build_model

        release = self.release
        sizes = {name: getattr(self.config, name) for name in ("dim", "blocks", "heads") if name in _arguments(release)}
        odd = [name for name, size in sizes.items() if _arguments(release)[name] != size]
        if odd:  # before a model is built of the config's sizes, which may be any
            return Finding("constants of the model", False, f"{odd[0]} of the model is not that of config.toml")
        frequencies = None if release.frequencies is None else torch.from_numpy(release.frequencies)
        with torch.random.fork_rng(devices=[]):
            again = build_model(self.config, self.plan(), len(release.vocabulary), frequencies, SecureRandom(seed=0))
        again.scale_rows(None)  # as it is released
        found = dict(release.model.named_buffers())
        wrong = [
            name
            for name, buffer in again.named_buffers()
            if name not in found or not torch.allclose(found[name], buffer, rtol=1e-4, atol=1e-6, equal_nan=True)
        ]
        if wrong:
            return Finding("constants of the model", False, f"{', '.join(wrong)} do not follow from what was released")
        return Finding("constants of the model", True, "follow from the released frequencies and the plan")

    def _transition_counts(self) -> Finding:
        """Popularity follows from the frequencies; rows of chances are shrunk, and not made of whole numbers."""
        name, release = "constants of the model", self.release
        if not isinstance(release.model, TransitionCounts) or release.frequencies is None:
            return Finding(name, False, "the file holds no transition counts with their frequencies")
        popularity = torch.from_numpy(release.frequencies / release.frequencies.sum())
        if not torch.allclose(release.model.popularity.double(), popularity, rtol=1e-4, atol=1e-9):
            return Finding(name, False, "popularity does not follow from the released frequencies")
        rows, chances, counts = counts_of(release.model)
        sums = np.bincount(rows, weights=chances, minlength=1)
        if not ((chances > 0).all() and (sums < 1).all()):
            return Finding(name, False, "chances of what comes next are not those of noisy counts: a row sums to 1")
        if (rows == release.model.targets.numpy()).any():
            return Finding(name, False, "an item follows itself, which is never counted")
        clear = counts[counts * 1e-6 < 1e-3 * (1 - sums[rows])]  # float32 still tells them from whole numbers
        if len(clear) < FEW:  # a noisy count is near a whole number with chance 1/50, and so is the pair's other one
            return Finding(name, True, "popularity follows from the frequencies; too few counts to look for whole ones")
        if float((np.abs(clear - np.round(clear)) < 1e-2).mean()) > 0.5:
            return Finding(name, False, "transition counts look exact: they are whole numbers")
        return Finding(name, True, "popularity follows from the frequencies; counts are no whole numbers")

    def metrics(self, dataset: Dataset | None) -> Finding:
        """Stated metrics are paid for, follow from what was released, and are those of the model, with noise."""
        stated, paid = self.facts.get("metrics"), [event for event in self.events() if event.label == METRICS]
        if stated is None and not paid:
            return Finding("metrics", True, "none released")
        if stated is None:
            return Finding("metrics", False, "the ledger has paid for them, but the statement has none")
        if not paid or not isinstance(paid[0], Gaussian):
            return Finding("metrics", False, "stated, but the ledger holds no event for them: they are not covered")
        release = MetricRelease.from_dict(stated, paid[0])
        if release.to_dict() != stated:
            return Finding("metrics", False, "do not follow from the noisy sums that were released")
        if dataset is None:
            return Finding("metrics", None, "follow from noisy sums; whether those are noisy was not checked")
        if release.p_value(served_ranks(self.release.model, dataset, vocabulary=self.vocabulary)) < ALARM:
            return Finding("metrics", False, "are not those of this model with the noise of the ledger")
        return Finding("metrics", True, "those of this model, with the noise of the ledger")

    def frequencies(self) -> Finding:
        """Frequencies are covered if an event paid for them, and noisy: counts of users are whole numbers."""
        frequencies = self.release.frequencies
        if frequencies is None:
            return Finding("frequencies", True, "none released")
        if not self.config.private:
            return Finding("frequencies", None, "exact: the run is not private")
        if not any(event.label in ("items", "frequencies", "transition counts") for event in self.events()):
            return Finding("frequencies", False, "released, but the ledger holds no event for them")
        counts = frequencies * self.facts["users"]
        clear = counts[counts > 1.5]  # the others may be at the floor
        if len(clear) < FEW:  # rounded to a grid, a single noisy count is a whole number with chance 1/100 or so
            return Finding("frequencies", True, "paid for in the ledger; too few to look for whole numbers")
        if float((np.abs(clear - np.round(clear)) < 1e-6).mean()) > 0.5:
            return Finding("frequencies", False, "look like exact counts of users")
        return Finding("frequencies", True, "paid for in the ledger, and no whole numbers")


def _arguments(release: Release) -> dict[str, Any]:
    return dict(release.model.arguments)


def counts_of(model: TransitionCounts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, chance, count) of each transition: T_ab = C_ab / (R_a + prior) solved for C."""
    rows = np.repeat(np.arange(model.num_items), model.offsets.diff().numpy())
    chances = model.chances.numpy().astype(np.float64)
    sums = np.bincount(rows, weights=chances, minlength=1)
    return rows, chances, chances * ROW_PRIOR / np.maximum(1 - sums, 1e-9)[rows]


def _raw_header(path: Path) -> bytes:
    """The JSON at the start of a safetensors file, as it stands there; a library would show a repeated key once."""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))
