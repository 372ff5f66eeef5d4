"""An entry for OpenDP's registry of deployments of differential privacy, as YAML.

The keys follow the schema of https://github.com/opendp/deployments-registry-data as of 2026-07-15. Tier 3, the most
detailed, needs a justification.
"""

from __future__ import annotations

import re
from typing import Any

from dpformer.accounting.units import unit_of
from dpformer.errors import DpformerError
from dpformer.statement.cards.source import CardSource
from dpformer.statement.cards.yaml import dump
from dpformer.statement.sp800_226 import NAME

UNPROTECTED = "The number of {plural} in the data, which is assumed public."


def registry_entry(source: CardSource) -> str:
    """The entry, as a draft. Required fields that the owner did not give are named in the error."""
    if not source.facts["private"]:
        raise DpformerError("this run is not private, but the registry lists deployments of differential privacy")
    if missing := source.deployment.missing():
        raise DpformerError(
            f"the registry requires {', '.join(missing)}: add them to [deployment] in a TOML file and give it with "
            "--deployment"
        )
    return dump(_entry(source))


def _entry(source: CardSource) -> dict[str, Any]:
    said = source.deployment
    assert said.name is not None and said.curator is not None and said.date is not None
    return {
        "url_slug": _slug(f"{said.name} {said.curator} {said.date.year}"),
        "status": "Draft",
        "tier": 3 if said.justification else 2,
        "deployment": {
            "basic": {
                "name": said.name,
                "data_curators": [said.curator],
                "intended_use": said.intended_use,
                "data_product_type": "Machine learning model",
                "data_product_region": said.region,
                "description": said.description,
                "publication_date": said.date.isoformat(),
                "data_product_sector": said.sector,
            },
            "dp_variant": _variant(source),
            "privacy_loss": _privacy_loss(source),
            "deployment_model": _deployment_model(source),
            "accounting": _accounting(source),
            "implementation": _implementation(source),
            "administrative": {"sources": said.sources, "registry_authors": said.authors},
        },
    }


def _variant(source: CardSource) -> dict[str, Any]:
    facts, said = source.facts, source.deployment
    unprotected = [UNPROTECTED.format(plural=unit_of(facts["unit"]).plural)]
    if "given" in facts:
        unprotected.append(f"{facts['given'].capitalize()}, taken from the data.")
    period = f", from {said.data_period}" if said.data_period else ""
    kind = "texts" if source.text else "histories of items, one for each user"
    return {
        "variant_name": "Approximate DP",
        "data_domain": f"Data sets of {kind}{period}, whose number is public. {' '.join(facts['data'])}",
        "unprotected_quantities": " ".join(unprotected),
    }


def _privacy_loss(source: CardSource) -> dict[str, Any]:
    facts = source.facts
    unit = unit_of(facts["unit"])
    return {
        "privacy_unit": f"{unit.name}-level",
        "privacy_unit_details": f"{unit.meaning} Adjacent: {facts['adjacency']}. {source.persons}".strip(),
        "privacy_parameters": {"epsilon": facts["epsilon"], "delta": facts["delta"]},
        "privacy_parameters_details": " ".join(facts["words"][1:]),
    }


def _deployment_model(source: CardSource) -> dict[str, Any]:
    said, answers = source.deployment, source.facts[NAME]
    return {
        "model_name": "Central",
        "model_name_details": answers["trust_model"],
        "actors": f"{said.curator} has the data and trains the model: trusted. Everyone who receives the model, now or "
        "later, with any knowledge of their own: not trusted. Anyone who reads the memory of the training machine, or "
        f"times it: out of scope. {said.access or ''}".strip(),
        "release_type": "Many releases" if said.many_releases else "One release",
        "release_type_details": f"{said.releases or answers['releases']}. Budget: {source.remaining}.",
        "data_source_type": "Dynamic" if said.dynamic else "Static",
        "data_source_type_details": answers["data_source"],
        "access_type": "Non-interactive",
        "access_type_details": "No one queries the data; the model itself is published.",
    }


def _accounting(source: CardSource) -> dict[str, Any]:
    facts = source.facts
    parts = ", ".join(f"{event['label']} (ε = {event['epsilon_alone']:.4g} on its own)" for event in facts["events"])
    return {
        "post_processing": facts[NAME]["post_processing"],
        "composition": f"{facts['accountant']}. Composed: {parts}.",
    }


def _implementation(source: CardSource) -> dict[str, Any]:
    facts, said = source.facts, source.deployment
    answers, versions = facts[NAME], facts["versions"]
    how = f"Gaussian mechanism; noise multipliers {', '.join(_noise(event) for event in facts['events'])}"
    if facts["steps"]:
        how += f"; DP-SGD with {facts['sampler']} sampling, gradients bounded by {facts['clip_norm']:g} per user"
    return {
        "preprocessing_and_hyperparameter_tuning": f"{answers['pre_processing']}. Tuning: {answers['tuning']}.",
        "mechanisms": "\n".join(
            [
                f"- {how}.",
                f"- Library: dpformer {versions['dpformer']} on PyTorch {versions['torch']}; random numbers: "
                f"{facts['random_source']}.",
                f"- Floating point: {answers['floating_point']}.",
                f"- Side channels: {answers['side_channels']}.",
                f"- Audit: {source.audited}",
                *([f"- Access: {said.access}"] if said.access else []),
            ]
        ),
        "justification": said.justification,
    }


def _noise(event: dict[str, Any]) -> str:
    return f"{event['noise_multiplier']:.4g} ({event['label']})"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "deployment"
