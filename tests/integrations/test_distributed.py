"""DDP and FSDP2 on processes joined by gloo: the model is that of one process, and what one refuses all refuse."""

from pathlib import Path

import pytest

import dpformer as dp
from dpformer.errors import DpformerError
from dpformer.integrations.distributed import DistributedClipping
from tests.distributed import jobs
from tests.integrations import loops

GUIDE = Path(__file__).parent.parent.parent / "docs" / "guide" / "several-machines.md"


@pytest.mark.parametrize("size", [2, 4])
def test_the_same_model_as_one_process(size: int) -> None:
    assert jobs.finish(jobs.start(size, loops.same_model, size > 2)) == [0] * size


def test_noise_is_there_once() -> None:
    assert jobs.finish(jobs.start(2, loops.one_noise)) == [0, 0]


def test_all_refuse_together() -> None:
    assert jobs.finish(jobs.start(2, loops.refusals)) == [0, 0]


def test_the_guide_runs() -> None:
    page = GUIDE.read_text(encoding="utf-8")
    assert jobs.finish(jobs.start(2, loops.guide, page)) == [0, 0]


def test_the_worked_example_sharded() -> None:
    pytest.importorskip("transformers")
    page = (GUIDE.parent / "trainers.md").read_text(encoding="utf-8")
    assert jobs.finish(jobs.start(2, loops.worked_example, page)) == [0, 0]


def test_processes_must_be_joined_first() -> None:
    from torch import nn

    with pytest.raises(DpformerError, match=r"call torch\.distributed\.init_process_group first"):
        DistributedClipping(nn.Linear(2, 2))
    assert issubclass(DistributedClipping, dp.PhantomClipping)
