"""Processes find each other in a store that former ones have written to, as torchrun keeps it between restarts."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dpformer.errors import DpformerError
from dpformer.training import rendezvous
from dpformer.training.rendezvous import check_gpus


def agree(store: dist.Store, ranks: list[int], size: int) -> list[str]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: rendezvous._agree_on_name(store, rank, size), ranks))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_new_name_at_each_start(size: int) -> None:
    store, names = dist.HashStore(), []
    for _ in range(3):
        found = agree(store, list(range(size)), size)
        assert len(set(found)) == 1
        names.append(found[0])
    assert len(set(names)) == 3


def test_what_the_dead_have_left_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that ended before all had come: the leader waits for the living, who wait for it."""
    store = dist.HashStore()
    store.set("question of 1", "dead")
    store.set("answer to dead", "old name")
    store.set("old name has 1", "")
    found = agree(store, [2, 1, 0], 3)  # the leader comes last
    assert len(set(found)) == 1 and found[0] != "old name"
    monkeypatch.setattr(rendezvous, "ARRIVAL", rendezvous.timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match="process 1 did not arrive within 0:00:00"):
        agree(store, [0], 2)


def test_a_gpu_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for fine in (None, "cpu", "cuda"):
        check_gpus(fine)
    with pytest.raises(DpformerError, match="device is 'cuda:1'; with several processes each uses its own GPU"):
        check_gpus("cuda:1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    check_gpus("cpu")
    with pytest.raises(DpformerError, match="3 processes on this machine have 2 GPUs: give --nproc-per-node 2"):
        check_gpus("cuda")
