"""Tables of the paper's page and of the study of Re-Attention as printed, from the store alone."""

import math
import statistics
from collections.abc import Callable

from experiments.ablation import ABLATIONS
from experiments.cells import EPSILONS, MET, TITLES, Cell, counts, floor, paper
from experiments.literal import CONTESTS, Contest, ablated, long_run, stretched
from experiments.paper_numbers import PAPER
from experiments.store import load
from experiments.tables import ALL_SEEDS, Result, build_of, last, markdown, pair, results

NAMES = {
    "gru": "GRU",
    "lstm": "LSTM",
    "unshared": "Transformer, not shared",
    "vanilla": "Transformer, vanilla",
    "literal": "**with Re-Attention**",
}
OF_PARTS = {
    "vanilla": "plain attention (vanilla)",
    "reattention": "renormalised rows, no gate",
    "gate": "plain rows × the gate",
    "literal": "**renormalised rows × the gate (literal)**",
    "constant": "plain rows × a constant, the gate's mean",
    "learned": "plain rows × a learned number, started there",
    "shuffled": "literal with the frequencies of other items",
}


def table(data: str) -> str:
    """The paper's table beside ours: every row says of how many seeds, epochs, which build and day it is."""
    rows = []
    for epsilon in EPSILONS:
        for model, title in NAMES.items():
            found = results(_cell_of(data, model, epsilon))
            printed = "{:.2f} / {:.2f}".format(*PAPER[data][model][epsilon])
            rows.append([f"{epsilon}", title, printed, *_told(found)])
        for contest in CONTESTS:
            if contest.data == data and (won := contest.winner(load)) is not None:
                found = results(lambda seed, w=won, e=epsilon: paper(data, w[0], e, seed, **w[1]))
                if found:
                    rows.append([f"{epsilon}", f"best recipe, {contest.title}", "", *_told(found)])
        rows.append([f"{epsilon}", "transition counts", "", *_told(results(lambda s, e=epsilon: counts(data, e, s)))])
    rows.append(["∞", "popularity, not private", "", *_told(results(lambda _: floor(data))[:1])])
    head = ["ε", "NDCG@10 / HIT@10, %", "paper, best epoch", "ours, last iterate", "seeds", "epochs", "build", "date"]
    return markdown(head, rows)


def _cell_of(data: str, model: str, epsilon: float) -> Callable[[int], Cell]:
    if model in ("vanilla", "literal"):
        return lambda seed: long_run(data, model, epsilon, seed)
    return lambda seed: paper(data, model, epsilon, seed, **MET[data])


def _told(found: list[Result]) -> list[str]:
    if not found:
        return ["–"] * 5
    found = [result for result in found if "build" in result] or found  # no mean over an old build and a new one
    epochs = {f"{result['config']['epochs']:g}" for result in found if "epochs" in result.get("config", {})}
    builds = sorted({build_of(result) for result in found})
    dates = sorted({result.get("date", "") for result in found} - {""})
    days = " … ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else ""
    return [
        pair([last(result) for result in found]),
        str(len(found)),
        ", ".join(sorted(epochs)),
        ", ".join(builds),
        days,
    ]


def gains() -> str:
    """Re-Attention against vanilla: means over the seeds that both have, and the gain with its standard error."""
    rows = []
    for data in PAPER:
        for epsilon in EPSILONS:
            both = _paired(lambda model, seed, d=data, e=epsilon: long_run(d, model, e, seed))
            if not both:
                continue
            printed = PAPER[data]["literal"][epsilon][0] - PAPER[data]["vanilla"][epsilon][0]
            rows.append([TITLES[data], f"{epsilon}", *_compared(both), f"{printed:+.2f}"])
    if not rows:
        return "*No pair is in the store yet.*"
    return markdown(["data", "ε", "vanilla, NDCG@10 / HIT@10, %", "literal", "gain in NDCG@10", "seeds", "paper"], rows)


def _paired(cell: Callable[[str, int], Cell]) -> list[tuple[Result, Result]]:
    """Vanilla and literal of the seeds and builds that both have."""
    found = []
    for seed in ALL_SEEDS:
        vanilla, literal = (load(cell(model, seed).name) for model in ("vanilla", "literal"))
        if vanilla is not None and literal is not None and build_of(vanilla) == build_of(literal):
            found.append((vanilla, literal))
    return found


def _compared(both: list[tuple[Result, Result]]) -> list[str]:
    columns = [pair([last(result) for result in column]) for column in zip(*both, strict=True)]
    return [*columns, gain([100 * (last(b)["ndcg@10"] - last(a)["ndcg@10"]) for a, b in both]), str(len(both))]


def gain(differences: list[float]) -> str:
    """The mean, and its standard error where there is more than one."""
    error = f" ± {statistics.stdev(differences) / math.sqrt(len(differences)):.2f}" if len(differences) > 1 else ""
    return f"{statistics.mean(differences):+.2f}{error}"


def by_epoch() -> str:
    """The pairs of MovieLens at ε = 5, by seed and epoch; other scales and 100 epochs."""
    named = [(model, long_run("ml-1m", model, 5, seed)) for seed in ALL_SEEDS for model in ("vanilla", "literal")]
    for cell in stretched():
        scale = cell.choices.get("reattention_scale")
        told = f", scale {scale:g}" if scale else f", {cell.choices['epochs']} epochs"
        named.append((cell.label.split("-")[0] + told, cell))
    rows = []
    for title, cell in named:
        result = load(cell.name)
        if result is not None:
            epochs = {round(point["epoch"]): 100 * point["masked"]["ndcg@10"] for point in result["curve"]}
            shown = [f"{epochs[e]:.2f}" if e in epochs else "" for e in _EPOCHS]
            rows.append([title, str(cell.seed), *shown, build_of(result)])
    return (
        markdown(["NDCG@10, %", "seed", *map(str, _EPOCHS), "build"], rows) if rows else "*None is in the store yet.*"
    )


_EPOCHS = (10, 20, 30, 40, 50, 60, 80, 100)


def of_parts() -> str:
    """What literal Re-Attention is made of: MovieLens at ε = 5, and the gain over vanilla of the same seeds."""
    rows = []
    for name, title in OF_PARTS.items():
        found = {seed: result for seed in ALL_SEEDS if (result := load(_part(name, seed).name)) and "build" in result}
        vanilla = {seed: load(_part("vanilla", seed).name) for seed in found}
        differences = [
            100 * (last(result)["ndcg@10"] - last(other)["ndcg@10"])
            for seed, result in found.items()
            if (other := vanilla[seed]) is not None and build_of(other) == build_of(result)
        ]
        points = [last(result) for result in found.values()]
        seeds = ", ".join(map(str, found))
        rows.append([title, pair(points), gain(differences) if differences and name != "vanilla" else "", seeds])
    return markdown(["attention", "NDCG@10 / HIT@10, %", "gain over vanilla", "seeds"], rows)


def _part(name: str, seed: int) -> Cell:
    return ablated(name, seed) if name in ABLATIONS else long_run("ml-1m", name, 5, seed)


def contests() -> str:
    """Candidates on validation items, ε = 5, one seed; the winner in bold."""
    rows = []
    for contest in CONTESTS:
        won = contest.winner(load)
        for setting, cell in zip(contest.settings, contest.candidates(), strict=True):
            result = load(cell.name)
            points = [] if result is None else [last(result)]
            told = f"**{pair(points)}**" if setting == won else pair(points)
            rows.append([TITLES[contest.data], contest.title, setting[0], _choices(setting[1]), told])
    return markdown(["data", "kind", "attention", "choices", "NDCG@10 / HIT@10 on validation items, %"], rows)


def _choices(changes: dict[str, object]) -> str:
    return ", ".join(f"`{name.replace('_', '-')} {value}`" for name, value in changes.items())


def finals() -> str:
    """The winners on test items, with each kind of attention."""
    rows = [row for contest in CONTESTS for row in _finals(contest)]
    if not rows:
        return "*No contest is decided yet: `DPFORMER_DATA=FOLDER python -m experiments.fill --literal`.*"
    head = ["data", "kind", "ε", "attention", "NDCG@10 / HIT@10, %", "seeds", "gain of literal", "paper"]
    return markdown(head, rows)


def _finals(contest: Contest) -> list[list[str]]:
    won, rows = contest.winner(load), []
    for epsilon in (5, 10) if won is not None else ():
        assert won is not None
        both = _paired(lambda model, seed, e=epsilon: paper(contest.data, model, e, seed, **won[1]))
        printed = "{:.2f} / {:.2f}".format(*PAPER[contest.data]["literal"][epsilon])
        for model in ("vanilla", "literal"):
            found = results(lambda seed, m=model, e=epsilon: paper(contest.data, m, e, seed, **won[1]))
            of_pair = _compared(both)[2] if both and model == "literal" else ""
            points = pair([last(result) for result in found])
            rows.append(
                [TITLES[contest.data], contest.title, f"{epsilon}", model, points, str(len(found)), of_pair, printed]
            )
    return rows
