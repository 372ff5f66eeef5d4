"""Checks of the released file: the statement must account for everything in it.

Tensors and header are listed; untrained constants of the model must follow from the noisy frequencies and the plan;
frequencies, counts and metrics must be noisy, and paid for in the ledger.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from dpformer.accounting.events import Event
from dpformer.data import Vocabulary
from dpformer.data.attributes import Attributes
from dpformer.data.tokens import Tokens
from dpformer.files import strict_json
from dpformer.findings import Finding
from dpformer.queries.popularity import popularity_event
from dpformer.runs.config import Config
from dpformer.runs.model_file import Release, load_release, sha256_of
from dpformer.runs.tasks import task_of
from dpformer.training.plan import Plan

METADATA = {"headline", "private", "epsilon", "delta", "versions"}
HEADER = {"format", "model", "arguments", "metadata", "sha256"}
FEW = 20  # number of counts at which an honest run looks exact with probability 10⁻⁸


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
        """The file must have the stated hash: changed weights, or a count times 1.01, make another file."""
        name = "hash of the model"
        if not self.path.is_file():
            return Finding(name, False, "model.safetensors is missing, so the statement is about nothing")
        same = hmac.compare_digest(str(self.facts["hashes"].get("model")), sha256_of(self.path))
        return Finding(name, same, "" if same else "model.safetensors does not match the statement")

    def titles(self) -> Finding:
        """Titles must be public: from the given catalogue, or the characters of a language model."""
        titles, name = self.release.titles, "titles"
        if titles is None:
            return Finding(name, True, "none")
        if self.config.task == "lm":
            due = self._tokens().vocabulary.titles
            same = list(due or ()) == titles
            return Finding(name, same, "the tokens of the config" if same else "differ from the tokens of the config")
        if self.catalog is None:
            return Finding(name, None, "not compared: the catalogue was not given")
        known = dict(zip(self.catalog.ids, self.catalog.titles or [""] * len(self.catalog), strict=True))
        wrong = [t for i, t in zip(self.release.vocabulary, titles, strict=True) if known.get(str(i)) != t]
        return Finding(name, not wrong, f"{wrong[0]!r} is not in the catalogue" if wrong else "those of the catalogue")

    def attributes(self) -> Attributes | None:
        """The attributes of the public catalogue for the items of the model; None if there are none."""
        catalog = self.catalog
        if catalog is None or catalog.attributes is None or not self.config.attributes:
            return None
        return catalog.attributes.of_rows(catalog.match([str(item) for item in self.release.vocabulary]))

    def _tokens(self) -> Tokens:
        """The vocabulary of text: the config's characters, or the tokenizer in the file itself."""
        if self.config.tokenizer is None and self.config.base is None:
            return Tokens.of_characters(self.config.characters or "ascii")
        return Tokens.from_json(self.release.metadata["text"]["tokenizer"])

    def sentence_on_tokens(self) -> str:
        return self._tokens().description if self.config.task == "lm" else ""

    def model_file(self) -> Finding:
        """Tensors of the model, vocabulary, titles, frequencies and one header, and nothing else."""
        if not self.path.is_file():  # reading a named pipe would block
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
        release = self.release  # refuses anything but the exact state of the model it names
        if release.titles is not None and self.config.items_policy != "catalog":
            extra.append("titles (no public catalogue was given)")
        if extra:
            return Finding("model file", False, f"contains what the statement does not cover: {', '.join(extra)}")
        return Finding("model file", True, f"{len(names)} tensors of the model, its vocabulary and frequencies")

    def model_metadata(self) -> Finding:
        found = self.release.metadata
        extra = sorted(found.keys() - METADATA - task_of(self.config).metadata_keys)
        if extra:
            return Finding(
                "metadata of the model", False, f"contains {', '.join(extra)}, which the statement does not cover"
            )
        wrong = sorted(name for name in METADATA if found.get(name) != self.facts.get(name))
        return Finding(
            "metadata of the model", not wrong, f"differs from the statement in {', '.join(wrong)}" if wrong else ""
        )

    def constants(self) -> Finding:
        """Untrained parts of the model must follow from what was released with noise."""
        return self.config.kind.constants(self.config, self.plan(), self.release)

    def frequencies(self) -> Finding:
        """Frequencies must be paid for by an event, and noisy: counts of users would be integers."""
        frequencies = self.release.frequencies
        if frequencies is None:
            return Finding("frequencies", True, "none released")
        if not self.config.private:
            return Finding("frequencies", None, "exact: the run is not private")
        if popularity_event(self.events()) is None:
            return Finding("frequencies", False, "released, but the ledger holds no event for them")
        counts = frequencies * self.facts["users"]
        clear = counts[counts > 1.5]  # the others may be floored
        if len(clear) < FEW:  # rounded to a grid, a noisy count is an integer with probability of about 1/100
            return Finding("frequencies", True, "paid for in the ledger; too few to test for integers")
        if float((np.abs(clear - np.round(clear)) < 1e-6).mean()) > 0.5:
            return Finding("frequencies", False, "look like exact counts of users")
        return Finding("frequencies", True, "paid for in the ledger, and not integers")


def _raw_header(path: Path) -> bytes:
    """The JSON at the start of a safetensors file, verbatim; a library would show a repeated key once."""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))
