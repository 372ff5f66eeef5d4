"""`--bf16`: forward passes in bfloat16, everything else in float32; a run that is resumed goes on in it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dpformer.clipping import normalize
from dpformer.models import GRU, SequenceModel, Transformer
from dpformer.runs import Config, resume, train
from dpformer.runs.signals import Interrupted
from dpformer.training.gradient_sum import GradientSum
from dpformer.training.trainer import Trainer
from tests.tiny_runs import printed, refused
from tests.training.conftest import tiny_config


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("choices", [{}, {"reattention": False, "clipping": "clip"}, {"model": "gru"}])
def test_a_run_in_bf16_and_the_same_one_resumed(
    choices: dict[str, Any], log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(log, bf16=True, **choices)
    seen: set[torch.dtype] = set()
    linear = nn.functional.linear

    def watched(*given: Any, **named: Any) -> torch.Tensor:
        seen.add((made := linear(*given, **named)).dtype)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "linear", watched)
        whole = train(config, tmp_path / "whole").folder
    assert torch.bfloat16 in seen or choices.get("model") == "gru"
    advance = Trainer.advance

    def stopped(self: Trainer) -> Any:
        if self.step == 3:
            raise KeyboardInterrupt
        return advance(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", stopped)
        with pytest.raises((KeyboardInterrupt, Interrupted)):
            train(config.replace(checkpoint_seconds=0.0), tmp_path / "part")
    resume(tmp_path / "part")
    one, other = weights(whole), weights(tmp_path / "part")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not {t.dtype for t in one.values()} & {torch.bfloat16, torch.float16}


def test_it_is_among_all_options_and_for_networks_only(log: Path) -> None:
    assert "--bf16" in printed("train", "--help-all")
    assert "--bf16" not in printed("train", "--help")
    assert "bf16 applies to networks" in refused("train", log, "--model", "counts", "--bf16")
    assert not Config.make(model="transformer").bf16


@pytest.mark.parametrize("kind", ["vanilla", "reattention", "gru"])
def test_a_long_history_does_not_change_how_others_round(kind: str) -> None:
    """Padded to its length, 300 others moved by 0.01 C together, and more in longer runs."""
    torch.manual_seed(0)
    model: SequenceModel
    if kind == "gru":
        model = GRU(300, 200, dim=32, dropout=0.0)
    else:
        model = Transformer(300, 200, dim=32, dropout=0.0, reattention=kind == "reattention")
        model.set_privacy(1.0, 60, torch.full((300,), 0.01))
    random = np.random.default_rng(0)
    others = sorted((random.integers(0, 300, random.integers(2, 40)) for _ in range(60)), key=len, reverse=True)

    def total(histories: list[np.ndarray]) -> torch.Tensor:
        gradients = GradientSum(model, normalize(1.0), tokens=8192, bf16=True)
        gradients.add(histories)
        return torch.cat([t.flatten() for t in gradients.totals if t is not None])

    long = random.integers(0, 300, 201)
    moved = total([long, *others]) - total(others) - total([long])
    assert float(moved.norm()) < 1e-6
