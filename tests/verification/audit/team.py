"""Audits of several processes for tests: canaries through the real team, with faults put into every process."""

import json
import os
from pathlib import Path
from typing import Any

CLAIM: dict[str, Any] = {"noise_multiplier": 1.2, "sample_rate": 0.2, "steps": 24, "delta": 1e-3}


def audited(fault: str, out: Path) -> None:
    """One process of a job: the leader audits and writes what was found; another one that never had work fails."""
    from dpformer.training.distributed import start_team
    from dpformer.verification.audit import audit

    FAULTS[fault]()
    worked = _count_work()
    team = start_team()
    assert team is not None
    if team.leads:
        result = audit(**CLAIM, canaries=3000, seed=0, team=team)
        team.dismiss()
        out.write_text(json.dumps(result.to_dict()))
    else:
        team.follow()
    assert worked[0] >= CLAIM["steps"] / 2, "this process had nothing to do"


def _count_work() -> list[int]:
    from dpformer.training.gradient_sum import GradientSum

    add, worked = GradientSum.add, [0]

    def counted(self: GradientSum, histories: Any, micro_batches: Any = None, seed: Any = None) -> Any:
        worked[0] += bool(micro_batches)
        return add(self, histories, micro_batches, seed)

    GradientSum.add = counted  # type: ignore[method-assign]
    return worked


def _noise_of_every_rank(share: float) -> None:
    """Each process adds noise with deviation σC·share to its own part of the sum, and the optimizer none."""
    import torch

    from dpformer.training.distributed import Team
    from dpformer.training.optimizer import PrivateOptimizer

    bring_back = Team._bring_back
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))

    def noisy(self: Team, own: Any, report: Any) -> Any:
        deviation = share * CLAIM["noise_multiplier"] * own.clip.clip_norm
        zeros = [torch.zeros(p.shape, dtype=torch.float64) for p in own.parameters]
        sums = [zero if total is None else total for zero, total in zip(zeros, own.totals, strict=True)]
        made = [deviation * torch.randn(s.shape, dtype=torch.float64, generator=generator) for s in sums]
        own.totals = [s + n for s, n in zip(sums, made, strict=True)]
        return bring_back(self, own, report)

    Team._bring_back = noisy  # type: ignore[method-assign]
    from dpformer.noise.noisy_sums import Numbers

    def silent(self: PrivateOptimizer, parameters: Any, finite: Any) -> Any:
        for stream, p in enumerate(parameters):
            yield Numbers(
                self._random, self.steps, stream, p.numel(), ready=torch.zeros(p.numel(), dtype=torch.float64)
            )

    PrivateOptimizer._noise = silent  # type: ignore[method-assign]


def _same_share_twice() -> None:
    """Every process computes the leader's micro-batches."""
    from dpformer.training import distributed

    share = distributed._share

    def deal(trainer: Any, histories: Any, _: Any) -> Any:
        return share(trainer, histories, trainer.sum.cut(histories)[:: int(os.environ["WORLD_SIZE"])])

    distributed._share = deal


def _lost_share() -> None:
    """What the other processes bring back is thrown away."""
    import torch
    import torch.distributed as dist

    reduce = dist.reduce

    def forgetful(tensor: Any, dst: int) -> None:
        mine = tensor.clone() if int(os.environ["RANK"]) == dst else torch.zeros_like(tensor)
        reduce(mine, dst=dst)
        tensor.copy_(mine)

    dist.reduce = forgetful


def _same_share_twice_unseen() -> None:
    """And nobody looks whose losses a sum holds."""
    from dpformer.training import optimizer

    _same_share_twice()
    optimizer.check_users = lambda held, batch: None


FAULTS: dict[str, Any] = {
    "none": lambda: None,
    "noise of each rank divided by their number": lambda: _noise_of_every_rank(1 / int(os.environ["WORLD_SIZE"])),
    "all noise on every rank": lambda: _noise_of_every_rank(1.0),
    "the same share twice": _same_share_twice_unseen,
    "the same share twice, refused": _same_share_twice,
    "a lost share": _lost_share,
}
