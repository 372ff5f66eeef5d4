"""Notes for the person who starts a run: a large δ, and uncounted runs on the same data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from dpformer.data.dataset import Dataset
from dpformer.data.time_split import TimeSplitDataset
from dpformer.format_number import small

_fitted_here: set[str] = set()  # hashes of the data that this process trained on without a ledger


def notes(out: str | Path, dataset: Dataset, delta: float | None, ledger: bool) -> list[str]:
    """Notes on a large δ, and on earlier runs on the same data that no ledger counts.

    Args:
        out: the new run folder; its siblings are inspected.
        dataset: the training data.
        delta: δ, None without privacy.
        ledger: whether a ledger counts all runs.
    """
    said = delta_notes(delta, dataset.num_users)
    if ledger or delta is None:
        return said
    seen = {path.parents[1]: _hash(path.parents[1]) for path in Path(out).parent.glob("*/checkpoint/data.json")}
    hashes = {dataset.hash}
    if seen or _fitted_here:  # regardless of the split: the users are the same
        whole = dataset.leave_last_out() if isinstance(dataset, TimeSplitDataset) else dataset
        hashes |= {replace(whole, validation=held_out).hash for held_out in (False, True)}
    same = [str(path) for path, found in sorted(seen.items()) if found in hashes]
    if hashes & _fitted_here and not same:
        same = ["an earlier run of this process"]
    _fitted_here.add(dataset.hash)
    if same:
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        said.append(
            f"{same[0]}{more} used the same data: the budgets of all runs that anyone sees add up; count them with a "
            "ledger (--ledger FILE, ledger=…)"
        )
    return said


def delta_notes(delta: float | None, users: int) -> list[str]:
    """Notes on a δ that is large for so many users."""
    if delta is not None and delta > 1.000001 / users:
        return [
            f"δ = {small(delta)} is above 1 / {users:,} users: a mechanism that publishes one user's entire history "
            "would satisfy it; give a smaller delta"
        ]
    if delta is not None and delta > 0.1000001 / users:
        return [
            f"δ is above 1 / (10 · {users:,} users); NIST SP 800-226 recommends a much smaller one: give a smaller "
            "delta"
        ]
    return []


def _hash(run: Path) -> str | None:
    try:
        return str(json.loads((run / "checkpoint" / "data.json").read_text(encoding="utf-8"))["hash"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
