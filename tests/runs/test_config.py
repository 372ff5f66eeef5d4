from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpformer.errors import DpformerError
from dpformer.kinds.recipes import RECIPES
from dpformer.runs.config import SECTIONS, Config


def test_flags_win_over_the_file_and_the_file_over_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('recipe = "paper"\nepochs = 7\nlearning_rate = 0.1\n')
    config = Config.make(file, learning_rate=0.2, dim=None)
    assert (config.epochs, config.learning_rate, config.batch_size) == (7, 0.2, RECIPES["paper"]["batch_size"])
    assert config.frequency_bias is False, "from the recipe"
    assert config.dim == 64, "a flag that is not given does not count"


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"epsilonn": 5}, "unknown key 'epsilonn'; the nearest valid key is 'epsilon'"),
        ({"lr": 5}, "unknown key 'lr'; the nearest valid key is"),
        ({"epsilon": 0}, "epsilon is 0; it must be greater than 0"),
        ({"epsilon": -1.0}, "epsilon is -1.0; it must be greater than 0"),
        ({"epsilon": float("nan")}, "epsilon is nan; it must be greater than 0"),
        ({"delta": 1.0}, "delta is 1.0; it must be less than 1"),
        ({"delta": 0.0}, "delta is 0.0; it must be greater than 0"),
        ({"epochs": 0}, "epochs is 0; it must be greater than or equal to 1"),
        ({"batch_size": 1.5}, "batch_size is 1.5; it must be a valid integer"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be less than 1"),
        ({"learning_rate": float("inf")}, "learning_rate is inf; it must be a finite number"),
        ({"model": "bert"}, "model is 'bert'; it must be one of auto, counts"),
        ({"recipe": "secret"}, "recipe is 'secret'; it must be one of default, paper"),
        ({"heads": 3}, "heads is 3; it must divide dim, which is 64"),
        ({"model": "gru", "reattention": True}, "Re-Attention needs attention, but gru has none"),
        ({"file": "log.csv", "catalog": "c.csv", "assume_items_public": True}, "omit one"),
        ({"items_share": 0.0}, "items_share is 0.0; it must be greater than 0"),
        ({"frequency_share": 0.0}, "frequency_bias needs item frequencies"),
        ({"frequency_share": 0.0, "frequency_bias": False, "reattention": True}, "Re-Attention needs item frequencies"),
        ({"file": "l.csv", "items_share": 0.9, "private_metrics": True, "metrics_share": 0.1}, "lower them"),
        ({"seed": -1}, "seed is -1"),
        ({"warm_start": 0.5, "epsilon": float("inf")}, "warm_start needs a budget"),
        ({"warm_start": 0.5, "model": "counts"}, "warm_start applies to networks"),
        ({"warm_start": 0.9, "private_metrics": True, "metrics_share": 0.2}, "leave nothing for training"),
        ({"bands": 0}, "bands is 0; it must be greater than or equal to 1"),
        ({"bands": 4, "epsilon": float("inf")}, "bands is 4, which applies to networks trained with noise"),
        ({"bands": 4, "model": "counts"}, "bands applies to networks"),
        ({"row_exponent": 0.25}, "unknown key 'row_exponent'"),
    ],
)
def test_bad_choices_are_one_sentence(choices: dict[str, object], sentence: str) -> None:
    with pytest.raises(DpformerError) as error:
        Config.make(**choices)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_what_the_rule_for_reattention_fills_in_is_checked_too() -> None:
    config = Config.make(frequency_share=0.0, frequency_bias=False)
    with pytest.raises(DpformerError, match="Re-Attention needs item frequencies"):
        config.resolve(users=100, threads=1)


def test_bands_need_as_many_groups_of_a_batch_each() -> None:
    config = Config.make(bands=4, batch_size=25)
    assert config.model == "transformer" and config.resolve(users=100, threads=1).reattention is False
    with pytest.raises(DpformerError, match="a batch would need 100 users, but there are 99: lower one of them"):
        config.resolve(users=99, threads=1)


def test_files_that_are_not_toml(tmp_path: Path) -> None:
    with pytest.raises(DpformerError, match=r"none.toml cannot be read: No such file"):
        Config.make(tmp_path / "none.toml")
    for junk in (b"epsilon = = 5", b"\xff\xfe\x00"):
        (tmp_path / "c.toml").write_bytes(junk)
        with pytest.raises(DpformerError, match="is not TOML"):
            Config.make(tmp_path / "c.toml")
    (tmp_path / "c.toml").write_text("[training]\nepochs = 3\n")
    with pytest.raises(DpformerError, match=r"unknown key 'training' in .*c.toml; the nearest"):
        Config.make(tmp_path / "c.toml")


@given(
    name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    epsilon=st.one_of(st.floats(1e-6, 1e6), st.just(float("inf"))),
    users=st.integers(100, 10**9),
)
def test_the_resolved_config_survives_its_file(
    tmp_path_factory: pytest.TempPathFactory, name: str, epsilon: float, users: int
) -> None:
    config = Config.make(user_column=name, epsilon=epsilon, recipe="paper", batch_size=50)
    config = config.resolve(users=users, threads=2)
    file = tmp_path_factory.mktemp("config") / "config.toml"
    file.write_text(config.to_toml(), encoding="utf-8")
    again = Config.make(file)
    assert again == config and again.hash() == config.hash()


def test_resolve_leaves_nothing_open() -> None:
    config = Config.make(file=Path("log.csv"), model="transformer").resolve(users=1000, threads=3)
    assert (config.delta, config.batch_size, config.max_length, config.threads) == (1 / 10_000, 250, 200, 3)
    assert Config.make(file=Path("log.csv"), recipe="paper").resolve(users=2000, threads=1).delta == 1 / 2000
    assert config.reattention is True and config.file is not None and config.file.is_absolute()
    assert Config.make(model="gru").resolve(users=100, threads=1).reattention is False
    with pytest.raises(DpformerError, match="batch_size is 2,000, but there are only 1,000 users"):
        Config.make(batch_size=2000).resolve(users=1000, threads=1)


@pytest.mark.parametrize(
    ("choices", "model"),
    [
        ({}, "auto"),
        ({"model": "auto"}, "auto"),
        ({"file": Path("log.csv"), "epsilon": 1.0, "max_length": 50, "threads": 1}, "auto"),
        ({"recipe": "paper"}, "transformer"),
        ({"reattention": False}, "transformer"),
        ({"epochs": 3}, "transformer"),
        ({"epsilon": float("inf")}, "auto"),
        ({"model": "auto", "dim": 64}, "transformer"),
        ({"task": "lm", "file": Path("text.txt"), "unit": "line"}, "transformer"),
        ({"model": "gru", "epochs": 3}, "gru"),
    ],
)
def test_the_model_is_chosen_later_unless_a_network_must_be_meant(choices: dict[str, object], model: str) -> None:
    assert Config.make(**choices).model == model


def test_counts_take_whole_histories_unless_told_otherwise(tmp_path: Path) -> None:
    config = Config.make(file=Path("log.csv"), model="counts").resolve(users=1000, threads=1)
    assert config.max_length is None
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert Config.make(tmp_path / "config.toml") == config
    assert Config.make(model="counts", max_length=30).resolve(users=1000, threads=1).max_length == 30


def test_what_would_be_ignored_is_refused() -> None:
    with pytest.raises(DpformerError, match="epochs applies to networks, but model is counts: omit it"):
        Config.make(model="counts", epochs=3)


def test_where_a_run_computes_and_reads_is_not_in_its_hash(tmp_path: Path) -> None:
    here = Config.make(file=tmp_path / "log.csv", threads=1, device="cpu")
    there = Config.make(file=tmp_path / "moved" / "log.csv", threads=2, catalog=tmp_path / "items.csv")
    assert here.hash() == there.hash() != Config.make(file=tmp_path / "log.csv", epsilon=4.0).hash()


def test_every_choice_has_a_section_and_changes_the_hash() -> None:
    names = [name for section in SECTIONS for name in section.model_fields]
    assert sorted(names) == sorted(set(Config.model_fields) - {"deployment"})
    assert Config.make().hash() != Config.make(dim=32).hash()


def test_options_that_were_removed_may_stand_in_old_files_if_they_did_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('model = "transformer"\nreattention_error = "gradient"\n')
    assert Config.make(path) == Config.make(model="transformer")
    path.write_text('model = "transformer"\nrow_exponent = 0.25\n')
    with pytest.raises(DpformerError, match="row_exponent was removed"):
        Config.make(path)
