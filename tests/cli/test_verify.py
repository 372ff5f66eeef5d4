"""`dpformer verify`: a run as it was made passes, and whatever is changed in it afterwards is found."""

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from dpformer.cli import app
from dpformer.report.page import write_report
from dpformer.runs import Config, load_dataset, load_release, save_release, train
from dpformer.runs.model_file import _digest
from dpformer.runs.planning import make_plan
from dpformer.training.trainer import Trainer
from dpformer.verification.claims import Verification
from dpformer.verification.verify import verify
from tests.tiny_runs import invoke, printed, refused
from tests.training.conftest import tiny_config
from tests.training.crash import Crash, crash_after
from tests.training.logs import write_log
from tests.training.memo import accountant_remembers  # noqa: F401  (for all tests of this file)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified")
    return train(tiny_config(write_log(folder / "log.csv"), seed=None, epochs=2), folder / "run").folder


@pytest.fixture
def run(done: Path, tmp_path: Path) -> Path:
    return shutil.copytree(done, tmp_path / "run")


def wrong(result: Verification) -> set[str]:
    return {finding.name for finding in result.findings if finding.ok is False}


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


def test_a_run_as_it_was_made(run: Path) -> None:
    result = verify(run, dataset=load_dataset(Config.make(run / "config.toml")))
    assert result.passed and wrong(result) == set()
    assert result.not_checked == ["signature"], "everything else was looked at"
    assert not result.verified and result.verdict == (
        "Nothing contradicts the statement, but the model's privacy is NOT VERIFIED. "
        "Not checked: model; randomness; publisher."
    )
    assert result.headline.startswith("User-level differential privacy")


def test_nothing_in_the_folder_changes(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    verify(run)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


OTHER: dict[str, Any] = {
    "format": 1,
    "private": False,
    "epsilon": 1.0,
    "epsilon_target": 1.0,
    "delta": 1e-9,
    "unit": "event",
    "adjacency": "replace one user",
    "users": 6000,
    "accountant": "by hand",
    "sampler": "shuffling",
    "sample_rate": 0.1,
    "steps": 3,
    "expected_batch_size": 10,
    "noise_multiplier": 9.0,
    "clipping": "clip",
    "clip_norm": 0.1,
    "events": [],
    "random_source": "coins",
    "not_covered": [],
    "headline": "User-level differential privacy with ε = 0.1, δ = 1e-09, for everybody.",
    "words": ["All is well."],
    "versions": {},
}


@pytest.mark.parametrize("name", sorted(OTHER))
def test_every_changed_field_of_the_statement_is_found(run: Path, name: str) -> None:
    edit(run / "privacy.json", lambda facts: facts.update({name: OTHER[name]}))
    assert wrong(verify(run)), name


def test_changed_sentences_and_hashes_are_found(run: Path) -> None:
    dataset = load_dataset(Config.make(run / "config.toml"))
    edit(run / "privacy.json", lambda facts: facts["data"].pop())
    assert wrong(verify(run, dataset=dataset)) == wrong(verify(run)) == {"sentences on the data"}
    edit(run / "privacy.json", lambda facts: facts["hashes"].update(dict.fromkeys(facts["hashes"], "0" * 64)))
    assert {"hashes", "hash of the data", "hash of the model"} <= wrong(verify(run))


def test_missing_and_additional_fields_are_found(run: Path) -> None:
    edit(run / "privacy.json", lambda facts: facts.update(raw_counts=[1, 2, 3]))
    assert wrong(verify(run)) == {"statement"}
    edit(run / "privacy.json", lambda facts: (facts.pop("raw_counts"), facts.pop("not_covered")))
    assert wrong(verify(run)) == {"statement"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("noise_multiplier", 9.0), ("sample_rate", 0.01), ("steps", 1), ("private", False), ("label", "x"), ("kind", "y")],
)
def test_a_changed_ledger_is_found(run: Path, name: str, value: Any) -> None:
    edit(run / "privacy.json", lambda facts: facts["events"][-1].update({name: value}))
    assert "ledger" in wrong(verify(run))


def test_an_event_left_out_is_found_even_if_epsilon_is_made_to_fit(run: Path) -> None:
    """The ledger without the frequencies, with the ε that it then has, and all words rewritten."""
    from dpformer.accounting.events import Event
    from dpformer.statement.build import statement

    facts = json.loads((run / "privacy.json").read_text())
    config = Config.make(run / "config.toml")
    event = {name: value for name, value in facts["events"][-1].items() if name != "epsilon_alone"}
    forged = statement(
        [Event.from_dict(event)],
        delta=facts["delta"],
        target=config.epsilon,
        clipping=config.clipping,
        clip_norm=config.clip_norm,
        expected_batch_size=facts["expected_batch_size"],
        users=facts["users"],
        seeded=False,
        data=facts["data"],
        hashes=facts["hashes"],
        given=True,
        model=facts["model"],
    )
    assert forged["epsilon"] < facts["epsilon"]
    (run / "privacy.json").write_text(json.dumps(forged))
    assert wrong(verify(run)) == {"ledger", "metadata of the model", "frequencies"}


@pytest.mark.parametrize("line", ["epochs = 3", "clip_norm = 0.5", "batch_size = 10", "epsilon = 9.0", "seed = 3"])
def test_a_changed_config_is_found(run: Path, line: str) -> None:
    config, name = run / "config.toml", line.split()[0]
    kept = [old for old in config.read_text().splitlines() if not old.startswith(f"{name} =")]
    config.write_text("\n".join([line, *kept]))
    assert "hashes" in wrong(verify(run))


def test_more_steps_than_accounted_for_are_found(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 7, "loss": 1.0}\n')
    assert wrong(verify(run)) == {"steps taken"}
    metrics.unlink()
    found = verify(run)
    assert found.passed and "steps taken" in found.not_checked, "how many there were cannot be told any more"


# The released file.


def rewrite(path: Path, tensors: dict[str, torch.Tensor] | None = None, header: dict[str, str] | None = None) -> None:
    with safe_open(path, framework="pt") as file:
        kept = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    save_file({**kept, **(tensors or {})}, path, {**metadata, **(header or {})})


def test_a_tensor_too_many_is_found(run: Path) -> None:
    rewrite(run / "model.safetensors", {"raw_counts": torch.arange(4.0)})
    assert "model file" in wrong(verify(run))


def test_a_header_too_many_is_found(run: Path) -> None:
    rewrite(run / "model.safetensors", header={"users": "u1,u2,u3"})
    assert wrong(verify(run)) == {"hash of the model", "model file"}


def saved_again(run: Path, **changes: Any) -> Path:
    """The model written by the library itself, with other contents: its own digest is right."""
    release = load_release(run / "model.safetensors")
    given: dict[str, Any] = {
        "vocabulary": release.vocabulary,
        "titles": release.titles,
        "metadata": release.metadata,
        "frequencies": release.frequencies,
    }
    change = changes.pop("change", None)
    if change is not None:
        change(release.model)
    save_release(run / "model.safetensors", release.model, **{**given, **changes})
    digest = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
    edit(run / "privacy.json", lambda facts: facts["hashes"].update(model=digest))  # a forger would do that too
    return run


def test_the_model_written_again_passes(run: Path) -> None:
    assert verify(saved_again(run)).passed


def test_other_weights_are_another_file(run: Path) -> None:
    """The lowest bit of one weight: no statistic could find it, the hash does."""
    release = load_release(run / "model.safetensors")
    weight = next(release.model.parameters()).data.view(torch.int32)
    weight.view(-1)[0] ^= 1
    release_again = {"vocabulary": release.vocabulary, "metadata": release.metadata, "frequencies": release.frequencies}
    save_release(run / "model.safetensors", release.model, **release_again)
    assert wrong(verify(run)) == {"hash of the model"}
    (run / "model.safetensors").unlink()
    assert "hash of the model" in wrong(verify(run)), "a statement without its model is about nothing"


@pytest.mark.parametrize("hidden", ['"epsilon": 0.01', '"headline": "ε = 0.01"', '"words": ["alice has hiv-test-kit"]'])
def test_a_key_that_stands_twice_is_refused(run: Path, hidden: str) -> None:
    """Python reads the last one, other readers the first: the statement said two things, and `verify` saw one."""
    path = run / "privacy.json"
    path.write_text(path.read_text().replace("{", f"{{ {hidden},", 1))
    for command in ("verify", "report", "card"):
        assert "occurs twice" in refused(command, run), command


@pytest.mark.parametrize("inside", [True, False])
def test_text_under_a_key_of_the_model_that_stands_twice_is_found(run: Path, inside: bool) -> None:
    path = run / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].decode()
    old, new = (
        ('"dpformer":"{', '"dpformer":"{\\"format\\": \\"alice\\", ') if inside else ("{", '{"__metadata__":{"a":"b"},')
    )
    assert old in header
    changed = header.replace(old, new, 1).rstrip()
    changed += " " * (-len(changed.encode()) % 8)
    path.write_bytes(len(changed.encode()).to_bytes(8, "little") + changed.encode() + raw[8 + size :])
    edit(
        run / "privacy.json", lambda facts: facts["hashes"].update(model=hashlib.sha256(path.read_bytes()).hexdigest())
    )
    assert "model file" in wrong(verify(run))


def test_user_text_in_versions_and_hashes_is_found(run: Path) -> None:
    original = (run / "privacy.json").read_text()
    for change in (
        lambda facts: facts["versions"].update(torch="ann bought hiv-test-kit"),
        lambda facts: facts["versions"].update(note="1.0"),
        lambda facts: facts["hashes"].update(ann="0" * 64),
        lambda facts: facts["hashes"].update(config="ann"),
        lambda facts: facts["data"].append("Ann bought hiv-test-kit."),
    ):
        (run / "privacy.json").write_text(original)
        edit(run / "privacy.json", change)
        assert wrong(verify(run)) & {"versions", "hashes", "sentences on the data"}


def test_stray_files_beside_the_secrets_are_found(run: Path) -> None:
    (run / "checkpoint" / "old-state.safetensors").write_bytes(b"keys")
    assert wrong(verify(run)) == {"secrets"}


def test_user_ids_in_the_metadata_are_found(run: Path) -> None:
    metadata = {**load_release(run / "model.safetensors").metadata, "users": ["u1", "u2"]}
    assert wrong(verify(saved_again(run, metadata=metadata))) == {"metadata of the model"}


def test_another_epsilon_in_the_metadata_is_found(run: Path) -> None:
    metadata = {**load_release(run / "model.safetensors").metadata, "epsilon": 0.1}
    assert wrong(verify(saved_again(run, metadata=metadata))) == {"metadata of the model"}


def test_titles_without_a_public_catalogue_are_found(run: Path) -> None:
    titles = ["private note"] * len(load_release(run / "model.safetensors").vocabulary)
    assert wrong(verify(saved_again(run, titles=titles))) == {"model file"}


def test_raw_counts_as_frequencies_are_found(run: Path) -> None:
    items = len(load_release(run / "model.safetensors").vocabulary)
    counts = np.random.default_rng(0).integers(2, 50, items)
    found = wrong(verify(saved_again(run, frequencies=counts / 60)))
    assert {"frequencies", "constants of the model", "releases"} <= found


def test_raw_counts_in_the_bias_are_found(run: Path) -> None:
    result = verify(saved_again(run, change=lambda model: model.bias.copy_(torch.arange(float(len(model.bias))))))
    assert wrong(result) == {"constants of the model"}


def test_another_vocabulary_is_found(run: Path) -> None:
    items = len(load_release(run / "model.safetensors").vocabulary)
    dataset = load_dataset(Config.make(run / "config.toml"))
    result = verify(saved_again(run, vocabulary=[f"user {n}" for n in range(items)]), dataset=dataset)
    assert wrong(result) == {"facts on the data"}


@pytest.mark.parametrize("content", [b"", b"junk", b"\x80\x04N."])
def test_a_file_that_is_no_model_is_a_finding(run: Path, content: bytes) -> None:
    (run / "model.safetensors").write_bytes(content)
    assert "model file" in wrong(verify(run))


def test_keys_that_were_left_behind_are_found(run: Path) -> None:
    (run / "checkpoint" / "state.safetensors").write_bytes(b"keys")
    assert wrong(verify(run)) == {"secrets"}


def test_private_files_that_others_can_read_are_found(run: Path) -> None:
    (run / "metrics.jsonl").chmod(0o644)
    assert wrong(verify(run)) == {"secrets"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(name=st.sampled_from(sorted(OTHER)), value=JSON, drop=st.booleans())
def test_whatever_stands_in_a_statement_is_a_finding(done: Path, name: str, value: Any, drop: bool) -> None:
    """Nothing that a stranger writes there ends in a traceback, or passes."""
    facts = json.loads((done / "privacy.json").read_text())
    before = facts.pop(name)
    if not drop:
        facts[name] = value
    with tempfile.TemporaryDirectory() as folder:
        run = shutil.copytree(done, Path(folder) / "run")
        (run / "privacy.json").write_text(json.dumps(facts))
        assert verify(run).passed == (not drop and value == before and type(value) is type(before))


# Other data, other runs.


def test_other_data_is_found(run: Path, tmp_path: Path) -> None:
    other = load_dataset(tiny_config(write_log(tmp_path / "other.csv", seed=1)))
    assert "hash of the data" in wrong(verify(run, dataset=other))


def test_a_run_without_privacy_and_a_seeded_one_say_what_they_are(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv")
    for name, changes in (("open", {"epsilon": math.inf}), ("seeded", {"seed": 3})):
        folder = train(tiny_config(log, epochs=1, **changes), tmp_path / name).folder
        result = verify(folder)
        assert result.passed, wrong(result)
        assert result.headline.startswith("NOT PRIVATE")
        edit(folder / "privacy.json", lambda facts: facts.update(private=True))
        assert "statement" in wrong(verify(folder))


def test_an_unfinished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Trainer) -> dict[str, Any]:
        raise InterruptedError

    config = tiny_config(write_log(tmp_path / "log.csv"))
    monkeypatch.setattr(Trainer, "advance", stop)
    with pytest.raises(InterruptedError):
        train(config, tmp_path / "run")
    result = verify(tmp_path / "run")
    assert result.passed and result.headline == "unfinished: nothing has been released; 0 of 12 steps taken"
    assert {finding.name for finding in result.findings} >= {"plan", "noise multiplier", "steps counted"}


def test_an_unfinished_run_with_correlated_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_after(monkeypatch, 5)
    with pytest.raises(Crash):
        train(tiny_config(write_log(tmp_path / "log.csv"), bands=3, checkpoint_seconds=0.0), tmp_path / "run")
    assert verify(tmp_path / "run").passed
    monkeypatch.setattr(
        "dpformer.verification.verify.make_plan", lambda config, users: make_plan(config.replace(bands=2), users)
    )
    assert {"plan", "noise of the batches", "noise of the steps"} <= wrong(verify(tmp_path / "run"))


def test_the_command(run: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(run)])
    said = " ".join(result.output.split())
    assert result.exit_code == 0 and "the model's privacy is NOT VERIFIED" in said, result.output
    assert "checked by statement, ledger" in said and "not checked: verify --replay" in said and "assumed:" in said
    edit(run / "privacy.json", lambda facts: facts.update(epsilon=0.1))
    result = CliRunner().invoke(app, ["verify", str(run), "--json", "--no-read-data"])
    assert result.exit_code == 1 and json.loads(result.stdout)["passed"] is False


@pytest.mark.parametrize("model", ["counts", "transformer"])
def test_the_command_with_a_released_list_of_items(tmp_path: Path, model: str) -> None:
    log = write_log(tmp_path / "log.csv", users=600, items=4)
    more = {} if model == "counts" else {"items_share": 0.3, "epochs": 1}
    choices = {"assume_items_public": False, "epsilon": 20.0, "seed": None, "model": model, **more}
    folder = train(tiny_config(log, **choices), tmp_path / "run").folder
    result = CliRunner().invoke(app, ["verify", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["not_checked"] == ["signature"]


def test_correlated_noise(tmp_path: Path) -> None:
    """A run as it was made; then one that hides how noise was correlated, or claims more of it."""
    log = write_log(tmp_path / "log.csv")
    run = train(tiny_config(log, seed=None, epochs=2, bands=3), tmp_path / "run").folder
    result = verify(run, dataset=load_dataset(Config.make(run / "config.toml")))
    assert result.passed and result.not_checked == ["signature"]
    facts = json.loads((run / "privacy.json").read_text())
    assert (facts["bands"], facts["sampler"]) == (3, "Poisson, within groups used in rotation")
    assert any("was dealt at random into one of 3 groups, used in rotation" in sentence for sentence in facts["words"])
    page = write_report(run, out=tmp_path / "report.html").read_text()
    assert "noise is correlated over 3 steps" in page and "drawn independently in each step" not in page
    for change in (
        lambda facts: facts.pop("bands"),
        lambda facts: facts.update(bands=2),
        lambda facts: facts["events"][-1].update(bands=2),
        lambda facts: facts["events"][-1].update(kind="poisson_gaussian"),
    ):
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        edit(shutil.copytree(run, tmp_path / "other") / "privacy.json", change)
        assert not verify(tmp_path / "other").passed
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("bands = 3", "bands = 2"))
    assert {"ledger", "hashes"} <= wrong(verify(run))


def test_counts_that_back_off_to_attributes_are_made_again(tmp_path: Path) -> None:
    """Users stay with one of three kinds of items; the catalogue says which those are."""
    rng = np.random.default_rng(0)
    rows = [f"u{user},i{3 * rng.integers(20) + user % 3},{time}" for user in range(900) for time in range(8)]
    (tmp_path / "log.csv").write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    lines = [f"i{item},{'abc'[item % 3]}" for item in range(60)]
    (tmp_path / "items.csv").write_text("\n".join(["item_id,kind", *lines]) + "\n")
    log, catalog = tmp_path / "log.csv", tmp_path / "items.csv"
    done = train(Config.make(file=log, catalog=catalog, epsilon=8.0, threads=1), tmp_path / "run")
    assert done.release.model.num_attributes == 3
    found = json.loads(printed("verify", done.folder, "--json"))
    assert found["not_checked"] == ["signature"], found
    unread = json.loads(printed("verify", done.folder, "--no-read-data", "--json"))
    assert "releases" in unread["not_checked"]
    (tmp_path / "other.csv").write_text("\n".join(["item_id,kind", *lines[:1], *(f"i{n},a" for n in range(1, 60))]))
    other = json.loads(invoke("verify", done.folder, "--catalog", tmp_path / "other.csv", "--json").stdout)
    assert [finding["name"] for finding in other["findings"] if finding["ok"] is False] == [
        "releases",
        "noise of transitions",
    ]


def test_attributes_without_a_catalogue_are_found(run: Path) -> None:
    """Nobody reads them from a model that has none: any text could stand there."""
    path = run / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        about = json.loads(file.metadata()["dpformer"])
    tensors["attributes"] = torch.tensor(list(json.dumps([["user", "ann"]]).encode()), dtype=torch.uint8)
    del about["sha256"]
    save_file(tensors, path, {"dpformer": json.dumps({**about, "sha256": _digest(about, tensors)})})
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edit(run / "privacy.json", lambda facts: facts["hashes"].update(model=digest))
    assert wrong(verify(run)) == {"model file"}


def test_cards_say_what_the_statement_says(run: Path) -> None:
    """A card with ε = 0.01 passed, and the claim on the published files was called checked."""
    printed("card", run)
    printed("card", run, "--dpia")
    assert wrong(verify(run)) == set() and "documents" not in verify(run).not_checked
    card, audit = run / "README.md", run / "audit.json"
    text = card.read_text()
    card.write_text(text.replace("ε = 4", "ε = 0.01"))
    assert wrong(verify(run)) == {"documents"}
    for edited in (text + "\nCertified to be anonymous.\n", text):
        card.write_text(edited)
        audit.write_text('{"verdict": "Certified."}' if edited == text else "{}")
        result = verify(run)
        assert result.passed and "documents" in result.not_checked
        (files,) = (claim for claim in result.claims if claim.name == "published files")
        assert files.ok is None and files.name in result.verdict
        audit.unlink()
