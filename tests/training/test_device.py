"""A run computes where it is told to: on a second device, kept apart from the CPU, it makes the same model.

Up to rounding: kernels may add up in another order.

There is no GPU where these tests are written; `tests.second_device` stands in for one. What it cannot show are CUDA's
own kernels, streams and NCCL.
"""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dpformer import runs as training
from dpformer.errors import DpformerError
from dpformer.runs import Config
from dpformer.training.device import device_of
from dpformer.training.optimizer import PrivateOptimizer
from tests import second_device
from tests.distributed import jobs
from tests.training.conftest import tiny_config
from tests.training.logs import write_log
from tests.training.memo import _known, remember

needs_second = pytest.mark.skipif(not second_device.POSSIBLE, reason=second_device.REASON)
MAKE_TENSORS = {  # problems whose model makes tensors in `forward`, for any device that is the default
    "EmbeddingScaledInPlace", "PositionsOneDim", "PositionsTwoDim", "PositionsExpanded", "GeneratedBias",
    "RelativePositions", "MultiheadAttention", "EncoderLayer", "Encoder", "SASRec", "CellByHand",
    "LearnedAttentionBias", "ByMask",
}  # fmt: skip
CHOICES: list[dict[str, Any]] = [
    {"evaluate_every": 1},
    {"shared": False, "norm": "pre", "heads": 2, "reattention": False, "clipping": "clip"},
    {"model": "gru"},
    {"epsilon": float("inf")},
    {"task": "lm", "unit": "chunk", "evaluate_every": 1, "batch_size": 100},
]


def configs(log: Path) -> list[Config]:
    """Two steps each, of two micro-batches or so: everything is slow on a device written in Python."""
    small = {"batch_size": 12, "epochs": 1, "micro_batch_tokens": 60}
    return [
        tiny_config(log, **{"model": "transformer", "checkpoint_seconds": 0.0, **small, **choices})
        for choices in CHOICES
    ]


def noise_by_step(patch: pytest.MonkeyPatch) -> None:
    """Noise for both devices alike: a step's sum is part of its address, and devices may round it apart."""
    patch.setattr(PrivateOptimizer, "_address", lambda self, *_: self._random)


def train_there(log: Path, out: Path, known: dict[Any, float]) -> None:
    """All the configs on the second device, each interrupted after its first step and resumed."""
    remember()
    _known.update(known)
    second_device.add()
    with pytest.MonkeyPatch.context() as same:
        noise_by_step(same)
        for number, config in enumerate(configs(log)):
            folder = out / str(number)
            with contextlib.suppress(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
                patch.setattr("dpformer.runs.folder.Metrics.add", interrupt)
                training.train(config.replace(device="second"), folder)
            model = training.resume(folder).release.model.to("second")
            if config.model == "transformer":  # outside of the engine, this torch has no GRU for unknown devices
                assert model.scores([np.arange(3)]).device.type == "second"


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@needs_second
def test_the_same_model_on_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, batches, sums, noise, averages, checkpoints, evaluation: one that stays behind would be refused."""
    log = write_log(tmp_path / "log.csv", users=24)
    noise_by_step(monkeypatch)
    for number, config in enumerate(configs(log)):
        training.train(config, tmp_path / "here" / str(number))
    assert jobs.finish(jobs.start(1, train_there, log, tmp_path / "there", _known)) == [0]
    for number in range(len(CHOICES)):
        here, there = (load_file(tmp_path / place / str(number) / "model.safetensors") for place in ("here", "there"))
        for name in here:
            torch.testing.assert_close(there[name], here[name], rtol=0, atol=1e-5)  # a step is 5e-3


def engine_there() -> None:
    """Every problem of the clipping engine: norms and sums as on the CPU."""
    import dpformer as dp
    from tests.clipping.naive import engine, relative_error, sums
    from tests.clipping.problems import PROBLEMS
    from tests.clipping.test_exact import build

    torch.__future__.set_swap_module_params_on_conversion(True)  # as on CUDA, `module.to` keeps ties
    second_device.add()
    for problem in PROBLEMS:
        model, batch = build(problem, torch.float64)
        norms = engine(model, batch, dp.clip(0.8), self_check=False)
        gradients = [g.clone() for g in sums(model)]
        model.zero_grad()
        clipping = dp.PhantomClipping(model.to("second"), self_check=False)
        own = torch.device("second") if problem.name in MAKE_TENSORS else contextlib.nullcontext()
        with clipping.users(tuple(t.to("second") for t in batch)) as user, own:
            loss = model(*user)
        found = clipping.backward(loss, dp.clip(0.8))
        assert found.device.type == "second"
        torch.testing.assert_close(found.cpu(), norms, rtol=1e-9, atol=0)
        assert relative_error([g.cpu() for g in sums(model)], gradients) < 1e-9


@needs_second
def test_the_engine_on_another_device() -> None:
    assert jobs.finish(jobs.start(1, engine_there)) == [0]


def devices_apart() -> None:
    """What is between the devices is refused: else the tests above would show nothing."""
    second_device.add()
    here, there = torch.ones(3), torch.ones(3, device="second")
    assert type(there) is torch.Tensor and type(nn.Parameter(there)) is nn.Parameter
    assert (there + 1).device.type == there[1:].device.type == torch.zeros_like(there).device.type == "second"
    assert there.cpu().device.type == "cpu" and torch.equal((there + there).cpu(), here + here)
    for refused in (lambda: here + there, lambda: there.add_(here), lambda: torch.cat([here, there])):
        with pytest.raises(RuntimeError, match="two devices"):
            refused()
    with pytest.raises(TypeError, match="cpu"):
        there.numpy()


@needs_second
def test_the_second_device_is_kept_apart() -> None:
    assert jobs.finish(jobs.start(1, devices_apart)) == [0]


@pytest.mark.parametrize("name", ["nonsense", "meta", "cuda:7"])
def test_a_device_that_is_not_there(name: str, log: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DpformerError, match=f"device is '{name}', but torch cannot compute on it: .*; try --device cpu"
    ):
        training.train(tiny_config(log, device=name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_choice_is_kept_but_is_not_part_of_the_hash(log: Path) -> None:
    config = tiny_config(log).resolve(users=60, threads=1)
    assert config.device == str(device_of(None)) and f'device = "{config.device}"' in config.to_toml()
    assert config.hash() == config.replace(device="cuda").hash()
