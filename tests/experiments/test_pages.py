"""Pages of results from a small store: what is there is shown as it is, what is not is named with its command."""

import importlib
import json
import math
import re
from pathlib import Path

import pytest

from dpformer.runs.config import Config
from experiments import attention_maps, cells, literal, pages, plots, store, tables
from tests.tiny_runs import invoke

DOCS = Path(__file__).parents[2] / "docs"


def put(cell: cells.Cell, *levels: float, **more: object) -> None:
    """A result whose NDCG@10 runs through some levels; HIT is twice that, unmasked half."""
    curve = [
        {
            "step": 5 * place, "epoch": 5.0 * place, "split": "test", "training_loss": 7.0,
            "masked": {"ndcg@10": level, "hit@10": 2 * level},
            "unmasked": {"ndcg@10": level / 2, "hit@10": level},
            "text": {"loss": 100 * level, "bits_per_character": 100 * level / math.log(2)},
        }
        for place, level in enumerate(levels, start=1)
    ]  # fmt: skip
    store.RUNS.mkdir(exist_ok=True)
    noise = {
        "sample_rate": 0.1,
        "steps": 100,
        "noise_multiplier": 0.5,
        "revision": "abc1234-dirty",
        "config": {"epochs": cell.choices["epochs"]} if "epochs" in cell.choices else {},
    }
    result = {"cell": cell.name, "data": cell.data, "seed": cell.seed, "curve": curve, **noise, **more}
    (store.RUNS / f"{cell.name}.json").write_text(json.dumps(result))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "RUNS", tmp_path / "runs")
    for seed, level in enumerate((0.05, 0.06, 0.07)):
        put(cells.paper("ml-1m", "vanilla", 5, seed), 0.02, level + 0.01, level)
    put(cells.paper("ml-1m", "literal", 5), 0.02, 0.08, 0.081)
    put(literal.long_run("ml-1m", "literal", 10, 0), 0.02, 0.09)
    put(cells.counts("ml-1m", 5), 0.115, popularity={"masked": {"ndcg@10": 0.01, "hit@10": 0.02}} | _unmasked())
    put(cells.floor("ml-1m"), 0.018, tail=[[1, 90], [10, 20], [100, 1]], users=100, items=120)
    put(cells.heat_map("ml-1m", "vanilla")[4], 0.031)
    put(cells.language("vanilla", 5), 0.03, 0.025)
    return tmp_path


def _unmasked() -> dict[str, dict[str, float]]:
    return {"unmasked": {"ndcg@10": 0.005, "hit@10": 0.01}}


def test_last_and_best_and_the_spread_over_seeds(small: Path) -> None:
    rows = {line.split(" | ")[0].strip("| "): line for line in tables.accuracy("ml-1m", 5).splitlines()}
    vanilla = (
        "4.57 / 8.69 | 20 | 6.00 ± 1.00 / 12.00 ± 2.00 | 7.00 ± 1.00 / 14.00 ± 2.00 | 3.00 ± 0.50 / 6.00 ± 1.00 | 3"
    )
    assert vanilla in rows["Transformer, vanilla"]
    assert "5.88 / 11.13 | 20 | 8.10 / 16.20 | 8.10 / 16.20 |" in rows["**with Re-Attention, as printed**"]
    assert "| 11.50 / 23.00 |" in rows["**transition counts**"]
    assert "| – | – | – | 0 |" in rows["GRU"]


def test_rows_take_their_longest_run_and_both_transformers_the_same(small: Path) -> None:
    put(cells.decisive(0)[0], 0.2)
    assert "| 20 |" in tables.accuracy("ml-1m", 5).splitlines()[5], "without its pair it is not taken"
    put(cells.decisive(0)[1], 0.3)
    vanilla, other = tables.accuracy("ml-1m", 5).splitlines()[5:7]
    assert "| 60 | 20.00 / 40.00 |" in vanilla and "| 60 | 30.00 / 60.00 |" in other


def test_the_pages_of_the_project_can_be_made(small: Path) -> None:
    made = {name: small / name for name in pages.PAGES}
    (small / "results").mkdir()
    for name, page in made.items():
        page.parent.mkdir(exist_ok=True)
        page.write_text((DOCS / name).read_text(encoding="utf-8"), encoding="utf-8")
        pages.write(page, pages.blocks(small, page))
    text = "".join(page.read_text(encoding="utf-8") for page in made.values())
    for figure in ("convergence-ml-1m.svg", "heat-ml-1m.svg", "tinyshakespeare.svg"):
        assert f"](../results/{figure})" in text, "a figure stands beside others, and pages find it"
    for figure in ("long-tail.svg", "signals.svg"):
        assert f"]({figure})" in text and (small / "results" / figure).read_text().startswith("<?xml"), figure
    assert "convergence-games.svg)" not in text and "fill games`" in text, "a figure of nothing is not drawn"
    blocks = pages.blocks(small, small / "page.md")
    assert set(blocks) == set(re.findall("<!-- end of (.+?) -->", text)), "no figure is left out"
    page, figure = made["experiments/reattention.md"], small / "results" / "heat-ml-1m.svg"
    before = page.read_text(encoding="utf-8"), figure.read_bytes()
    pages.write(page, pages.blocks(small, page))
    assert before == (page.read_text(encoding="utf-8"), figure.read_bytes())


def test_what_is_missing_is_named_and_what_is_there_is_not(small: Path) -> None:
    text = pages.missing()
    assert text.startswith(f"8 of {len(literal.everything(store.load))} runs are in the store.")
    there = cells.paper("ml-1m", "vanilla", 5).name
    assert f"fill {there}  #" not in text and f"fill {cells.paper('games', 'gru', 5).name}  #" in text


def test_a_block_that_nobody_makes_is_an_error(small: Path) -> None:
    page = small / "page.md"
    page.write_text("<!-- gossip -->\n<!-- end of gossip -->\n")
    with pytest.raises(ValueError, match="has a block 'gossip'"):
        pages.write(page, pages.blocks(small, page))


def test_every_cell_is_a_valid_run_with_a_name_and_a_command_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFORMER_DATA", "data")
    every = literal.everything(store.load)
    assert len({cell.name for cell in every}) == len(every) == len({cell.command for cell in every})
    for cell in every:
        if cell.trains:
            config = cell.config()
            assert config.model == cell.choices["model"] and config.seed == cell.seed


def test_a_command_gives_the_config_of_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFORMER_DATA", "data")
    monkeypatch.chdir(tmp_path)
    seen: list[Config] = []
    command = importlib.import_module("dpformer.cli.train")  # the package's `train` is the function in it
    monkeypatch.setattr(command, "run_or_exit", lambda what, out, **_: seen.append(what))
    networks = cells.paper("games", "unshared", 8, 1), cells.ceiling("ml-1m"), cells.ablations()[0]
    for cell in (*networks, *(cells.counts(data, 5) for data in cells.ITEMS)):
        log = Path(cell.command.split()[2])  # refused if it does not exist, or cannot be read
        log.parent.mkdir(exist_ok=True)
        log.write_text("1\t2\t5\t3\n" if log.suffix == ".data" else "1 2\n")
        invoke(*cell.command.split()[1:])
        assert seen[-1].replace(file=None) == cell.config().replace(file=None)
    assert len(seen) == 7


def test_delta_and_items_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFORMER_DATA", "data")
    for cell in literal.everything(store.load):
        if cell.trains and cell.data in cells.ITEMS:
            config, users = cell.config(), cells.USERS[cell.data]
            assert config.resolve(users=users, threads=1).delta == 1 / users, cell.name
            assert config.items_policy == ("catalog" if cell.data == "synthetic" else "assumed-public"), cell.name


def test_attention_maps_of_no_models_are_not_drawn(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_maps, "WORK", small / "work")
    assert attention_maps.draw("ml-1m", small / "maps.svg") is None
    assert plots.heat("games", small / "heat.svg") is None
