"""Cards: every field from the statement or the owner, in the shape that the hub and the registry read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import dpformer as dp
from dpformer.errors import DpformerError
from dpformer.runs import Config, finished
from dpformer.statement.cards.yaml import dump
from dpformer.statement.deployment import Deployment
from tests.tiny_runs import copied, invoke, printed, tiny_run
from tests.training.memo import accountant_remembers  # noqa: F401

yaml = pytest.importorskip("yaml")

SECTION = """
[deployment]
name = "Films: for you"
curator = "Example | Ltd"
description = "Recommends films.\\nSecond line."
intended_use = "A page of films; <b>not</b> prices."
date = 2026-11-17
data_period = "2024-01 to 2025-06"
ids_are_persons = false
ids = "an account"
access = "Two engineers."
justification = "ε = 5 was what accuracy needed."
region = "EU"
sector = "Technology"
license = "apache-2.0"
authors = ["Ann", "Bob"]
"""
# The keys of each part of the registry's schema: required by us, optional; and its enumerations.
PARTS: dict[str, tuple[set[str], set[str]]] = {
    "basic": (
        {"name", "data_curators", "intended_use", "data_product_type", "data_product_region", "description",
         "publication_date"},
        {"data_product_sector"},
    ),
    "dp_variant": ({"variant_name", "data_domain", "unprotected_quantities"}, set()),
    "privacy_loss": (
        {"privacy_unit", "privacy_unit_details", "privacy_parameters", "privacy_parameters_details"}, set(),
    ),
    "deployment_model": (
        {"model_name", "model_name_details", "actors", "release_type", "release_type_details",
         "data_source_type", "data_source_type_details", "access_type", "access_type_details"},
        set(),
    ),
    "accounting": ({"post_processing", "composition"}, set()),
    "implementation": ({"preprocessing_and_hyperparameter_tuning", "mechanisms"}, {"justification"}),
    "administrative": ({"registry_authors"}, {"sources"}),
}  # fmt: skip
ONE_OF = {
    ("basic", "data_product_type"): {"Machine learning model"},
    ("dp_variant", "variant_name"): {"Approximate DP"},
    ("deployment_model", "model_name"): {"Central"},
    ("deployment_model", "release_type"): {"One release", "Many releases"},
    ("deployment_model", "data_source_type"): {"Static", "Dynamic"},
    ("deployment_model", "access_type"): {"Interactive", "Non-interactive"},
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory, model="counts", epsilon=8.0, private_metrics=True)


@pytest.fixture
def section(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.toml"
    path.write_text(SECTION, encoding="utf-8")
    return path


def metadata_of(card: str) -> dict[str, Any]:
    _, head, _ = card.split("---\n", 2)
    return dict(yaml.safe_load(head))


def test_the_model_card(done: Path, section: Path, tmp_path: Path) -> None:
    out = tmp_path / "README.md"
    assert printed("card", done, "--deployment", section, "--out", out).strip() == str(out)
    card, facts = out.read_text(encoding="utf-8"), finished(done).statement
    found = metadata_of(card)
    assert "differential_privacy" in found["tags"] and found["library_name"] == "dpformer"
    assert found["license"] == "apache-2.0"
    values = {m["type"]: m["value"] for m in found["model-index"][0]["results"][0]["metrics"]}
    assert values == {name: facts["metrics"][name] for name in ("ndcg@10", "hit@10")}
    for sentence in (facts["headline"], *facts["words"], *facts["data"], *facts["not_covered"]):
        assert sentence in card
    for answer in facts["nist_sp_800_226"].values():
        assert answer in card
    for said in ("Films: for you", "Example \\| Ltd", "2026-11-17", "2024-01 to 2025-06", "an account", "not audited"):
        assert said in card
    assert "<b>" not in card and "protected id by id" in card


def test_the_hub_reads_its_metadata(done: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    card = dp.load(done).card()
    data = hub.ModelCard(str(card)).data
    assert data.library_name == "dpformer" and data.eval_results[0].metric_type == "ndcg@10"
    assert "---" not in card._repr_markdown_().splitlines()[0]


def test_the_entry_of_the_registry(done: Path, section: Path, tmp_path: Path) -> None:
    out = tmp_path / "opendp.yaml"
    printed("card", done, "--opendp", "--deployment", section, "--out", out)
    entry, facts = yaml.safe_load(out.read_text(encoding="utf-8")), finished(done).statement
    assert set(entry) == {"url_slug", "status", "tier", "deployment"} and entry["status"] == "Draft"
    assert re.fullmatch("[a-z0-9-]+", entry["url_slug"]) and entry["tier"] == 3
    parts = entry["deployment"]
    assert set(parts) == set(PARTS)
    for name, (required, optional) in PARTS.items():
        assert required <= set(parts[name]) <= required | optional, name
        for key, value in parts[name].items():
            assert isinstance(value, list if key in ("data_curators", "registry_authors") else str | dict), key
    for (part, key), allowed in ONE_OF.items():
        assert parts[part][key] in allowed
    assert parts["basic"]["publication_date"] == "2026-11-17"  # text: the schema wants no date
    assert parts["privacy_loss"]["privacy_parameters"] == {"epsilon": facts["epsilon"], "delta": facts["delta"]}
    assert "2⁻¹⁰" in parts["implementation"]["mechanisms"] and parts["administrative"]["registry_authors"] == [
        "Ann",
        "Bob",
    ]
    styles = {token.style for token in yaml.scan(out.read_text(encoding="utf-8")) if hasattr(token, "style")}
    assert styles <= {None, "|", '"', "'"}  # the registry's own check


@pytest.mark.parametrize(
    "lines", ["", 'sources = "https://example.org"\nreleases = "monthly"\nmany_releases = true\n'], ids=["few", "all"]
)
def test_the_entry_validates_against_the_registry_schema(
    done: Path, section: Path, real_data: Path, tmp_path: Path, lines: str
) -> None:
    """The registry's own schema, strict on unknown keys and on the format of dates."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = yaml.safe_load((real_data / "opendp-registry-schema.yaml").read_text(encoding="utf-8"))
    section.write_text(SECTION + lines, encoding="utf-8")
    printed("card", done, "--opendp", "--deployment", section, "--out", tmp_path / "opendp.yaml")
    entry = yaml.safe_load((tmp_path / "opendp.yaml").read_text(encoding="utf-8"))
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    assert [error.message for error in checker.iter_errors(entry)] == []
    entry["deployment"]["product"] = entry["deployment"].pop("basic")  # as dpformer 0.1 wrote it
    assert len(list(checker.iter_errors(entry))) == 2


def test_help_shows_the_name_of_the_section() -> None:
    shown = printed("card", "--help")
    assert shown.count("[deployment]") == 2 and shown.count("[default:") == 2


def test_what_the_registry_requires_is_named(done: Path, tmp_path: Path) -> None:
    result = invoke("card", done, "--opendp")
    assert isinstance(result.exception, DpformerError) and "requires name, curator" in str(result.exception)
    assert not (done / "opendp.yaml").exists()


def test_no_entry_for_what_is_not_private(tmp_path_factory: pytest.TempPathFactory, section: Path) -> None:
    seeded = tiny_run(tmp_path_factory, model="counts", epsilon=8.0, seed=3)
    rec = dp.load(seeded)
    with pytest.raises(DpformerError, match="not private"):
        rec.card(opendp=True, deployment=Deployment.read(section).filled())
    assert "NOT PRIVATE" in rec.card()


def test_the_section_of_a_config_goes_with_the_run(section: Path, tmp_path: Path) -> None:
    config = Config.make(section, epsilon=3.0, model="counts")
    assert config.deployment is not None and config.deployment.authors == ["Ann", "Bob"]
    assert config.hash() == Config.make(epsilon=3.0, model="counts").hash()  # no choice of training
    again = tmp_path / "config.toml"
    again.write_text(config.to_toml(), encoding="utf-8")
    assert Config.make(again) == config


@pytest.mark.parametrize(
    "line, said",
    [
        ('nam = "x"', "unknown key 'nam'"),
        ('date = "17.11.2026"', "date of .deployment. is '17.11.2026'"),
        ("date = 17", "date of .deployment. is 17"),
        ('name = ""', "name of .deployment."),
        ('sector = "Films"', "sector of .deployment."),
        ("authors = []", "authors of .deployment."),
    ],
)
def test_a_bad_section_is_one_sentence(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f"[deployment]\n{line}\n")
    for read in (Deployment.read, Config.make):
        with pytest.raises(DpformerError, match=said):
            read(path)


def test_an_audit_and_a_ledger_are_in_the_card(done: Path, tmp_path: Path) -> None:
    run = copied(done, tmp_path)
    printed("audit", run, "--canaries", "400", "--seed", "1", "--json")
    assert "Consistent with the claim" in dp.load(run).card()
    kept = json.loads((run / "audit.json").read_text())
    kept["mechanisms"][0]["noise_multiplier"] *= 2
    (run / "audit.json").write_text(json.dumps(kept))
    with pytest.raises(DpformerError, match="unlike this run"):
        dp.load(run).card()
    printed("ledger", tmp_path / "ledger.json", "--epsilon", "9", "--delta", "1e-3")
    (run / "audit.json").unlink()
    with pytest.raises(DpformerError, match="does not count"):
        dp.load(run).card(ledger=tmp_path / "ledger.json")


NASTY = [
    "yes",
    "1",
    "a: b",
    "- x",
    "line\nline",
    " lead\nx",
    "\x07",
    "é\u2028",
    "\ud800",
    "'",
    '"',
    "#",
    "",
    "~",
    "2026-01-01",
]


def test_our_yaml_is_read_as_it_was_meant() -> None:
    tree: dict[str, Any] = {"a": {"b": NASTY, "on": True, "n": 1e-9, "empty": [], "none": {}}, "text": "x\n\ny: z\n  w"}
    tree["rows"] = [{"x": 1, "y": {"z": "a\nb"}}, {"x": 2}]
    read = yaml.safe_load(dump(tree).encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass"))
    assert read == tree
