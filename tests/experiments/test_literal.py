"""The study of Re-Attention as printed: which runs there are, how a recipe is chosen, what its tables say."""

from pathlib import Path
from typing import Any

import pytest
from experiments.literal import CONTESTS, Contest, long_run

from experiments import ablation, cells, literal, literal_tables, store
from tests.experiments.test_pages import put


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "RUNS", tmp_path / "runs")
    return tmp_path


def validated(cell: cells.Cell, level: float, split: str = "validation") -> dict[str, Any]:
    return {"curve": [{"split": split, "masked": {"ndcg@10": level, "hit@10": level}}]}


def test_pairs_differ_in_attention_alone() -> None:
    every = literal.queue(lambda _: None)
    for data in literal.REAL:
        for epsilon in cells.EPSILONS:
            with_it, without = (long_run(data, model, epsilon, 0) for model in literal.PAIR)
            assert with_it in every and without in every
            different = dict(with_it.choices.items() ^ without.choices.items())
            assert set(different) == {"reattention", "reattention_variant"}


def test_every_ablation_has_three_seeds_and_a_name_that_is_no_row_of_the_table() -> None:
    every = literal.queue(lambda _: None)
    for name in ablation.ABLATIONS:
        assert name not in cells.MODELS
        assert [cell.seed for cell in every if cell.ablation == name] == [0, 1, 2]
    assert all(cell.ablation is None or cell.command.endswith(cell.name) for cell in every), "no flag says it"


def test_a_recipe_is_chosen_on_validation_items_once_all_candidates_are_there() -> None:
    contest = Contest("ml-1m", "small", (("vanilla", {"dim": 8}), ("literal", {"dim": 16})))
    first, second = contest.candidates()
    assert first.choices["validation"] and "validation=True" in first.name
    found = {first.name: validated(first, 0.1)}
    assert contest.winner(found.get) is None and contest.finals(found.get) == []
    found[second.name] = validated(second, 0.2)
    assert contest.winner(found.get) == ("literal", {"dim": 16})
    finals = contest.finals(found.get)
    assert {cell.seed for cell in finals} == {0, 1, 2} and {cell.choices["epsilon"] for cell in finals} == {5, 10}
    assert {cell.label.split("-")[0] for cell in finals} == {"literal", "vanilla"}
    assert all("validation" not in cell.choices and cell.choices["dim"] == 16 for cell in finals)


def test_test_items_choose_nothing() -> None:
    contest = CONTESTS[0]
    found = {cell.name: validated(cell, 0.1, "test") for cell in contest.candidates()}
    with pytest.raises(AssertionError, match="never chosen on test items"):
        contest.winner(found.get)


def test_gains_are_of_the_same_seed_and_build(runs: Path) -> None:
    for seed, (plain, printed) in enumerate([(0.05, 0.06), (0.05, 0.064), (0.05, 0.09)]):
        put(long_run("ml-1m", "vanilla", 5, seed), plain, build="new" if seed < 2 else "old")
        put(long_run("ml-1m", "literal", 5, seed), printed, build="new")
    (row,) = literal_tables.gains().splitlines()[2:]
    assert "| 5.00 ± 0.00 / 10.00 ± 0.00 | 6.20 ± 0.28 / 12.40 ± 0.57 | +1.20 ± 0.20 | 2 | +1.31 |" in row


def test_rows_say_build_and_day_and_old_ones_are_marked(runs: Path) -> None:
    put(long_run("games", "vanilla", 8, 0), 0.01, build="abc", date="2026-11-18")
    put(long_run("games", "vanilla", 8, 1), 0.02, build="abc", date="2026-11-20")
    put(long_run("games", "vanilla", 8, 2), 0.09)  # of an old build: not part of the mean
    put(cells.paper("games", "gru", 8, **cells.MET["games"]), 0.01)
    lines = literal_tables.table("games").splitlines()
    (vanilla,) = [line for line in lines if line.startswith("| 8 | Transformer, vanilla")]
    assert vanilla.endswith("| 1.50 ± 0.71 / 3.00 ± 1.41 | 2 | 40 | abc | 2026-11-18 … 2026-11-20 |")
    (gru,) = [line for line in lines if line.startswith("| 8 | GRU")]
    assert gru.endswith("| 1.00 / 2.00 | 1 | 20 | abc1234† |  |")


def test_parts_are_compared_with_vanilla_of_their_seeds(runs: Path) -> None:
    for seed in (0, 1):
        put(long_run("ml-1m", "vanilla", 5, seed), 0.04 + 0.01 * seed, build="new")
        put(literal.ablated("gate", seed), 0.05 + 0.01 * seed, build="new")
    (gate,) = [line for line in literal_tables.of_parts().splitlines() if "× the gate |" in line]
    assert "| 5.50 ± 0.71 / 11.00 ± 1.41 | +1.00 ± 0.00 | 0, 1 |" in gate
