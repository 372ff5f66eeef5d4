"""Users are collated alone and put together: nothing of one depends on another."""

from typing import Any

import numpy as np
import pytest
import torch

from dpformer.errors import DpformerError
from dpformer.integrations.batches import LogicalBatches, Part
from dpformer.integrations.losses import user_losses
from dpformer.integrations.users import Users
from dpformer.sampling import PoissonBatches
from tests.integrations.texts import collate, gpt2, rows

pytest.importorskip("transformers")


def batches(people: Users, collator: Any = collate, most: int = 4, steps: int = 3) -> LogicalBatches:
    return LogicalBatches(
        people, PoissonBatches(len(people), 0.5, steps, seed=1), collator, most, lambda step, user: 1000 * step + user
    )


def test_a_user_is_all_examples_with_one_id() -> None:
    examples = rows(users=5, most=3)
    people = Users(examples, "author")
    assert len(people) == 5
    for user in range(5):
        names = {example["author"] for example in people[user]}
        assert len(names) == 1 and people[user] == [e for e in examples if e["author"] in names]
    alike = Users([[e for e in examples if e["author"] == f"u{i}"] for i in range(5)])
    assert sorted(map(len, map(alike.__getitem__, range(5)))) == sorted(map(len, map(people.__getitem__, range(5))))


def test_digest_tells_data_apart() -> None:
    examples = rows(users=5, most=3)
    same, moved = Users(examples, "author").digest(), [dict(e) for e in examples]
    assert Users([dict(e) for e in examples], "author").digest() == same
    moved[0]["input_ids"] = [*moved[0]["input_ids"][:-1], 39 - moved[0]["input_ids"][-1]]
    assert Users(moved, "author").digest() != same


@pytest.mark.parametrize(
    ("data", "by", "says"),
    [
        (rows(3), "writer", "has no 'writer'"),
        (rows(3), ["a"], "1 user ids for 3 examples"),
        (rows(3), ["a", None, "b"], "example 1 has no user id"),
        (rows(3), [1.0, float("nan"), 2.0], r"example 1 has no user id \(nan\)"),
        (rows(3), [1.0, 2.0, 2.0**53], "stands for several integers"),
        (rows(3), np.array([1, 2**24, 2], dtype=np.float32), "stands for several integers"),
        (rows(1), None, "has 1 users"),
        (iter([]), None, "map-style"),
    ],
)
def test_bad_users(data: Any, by: Any, says: str) -> None:
    with pytest.raises(DpformerError, match=says):
        Users(data, by)


def test_every_drawn_user_is_in_one_part() -> None:
    people = Users(rows(users=30, most=3), "author")
    data = batches(people)
    for step in range(3):
        batch = data[step]
        assert batch.users == len(data.batches.draw(step))
        drawn = sorted(ids for user in data.batches.draw(step) for ids in (e["input_ids"] for e in people[user]))
        found = sorted(
            row[mask.bool()].tolist()
            for part in batch
            for row, mask, real in zip(
                part.inputs["input_ids"], part.inputs["attention_mask"], part.real.flatten(), strict=True
            )
            if real
        )
        assert found == drawn


def test_losses_alone_and_together() -> None:
    """Padding to the longest and rows of others change nothing; computed user by user in float64."""
    model = gpt2().double()
    people = Users(rows(users=12, most=3), "author")
    part = Part.of([collate(people[user]) for user in range(12)])
    together = user_losses(model, part)
    for user in range(12):
        nats, count = 0.0, 0
        for example in people[user]:
            ids = torch.tensor([example["input_ids"]])
            logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            nats -= logits.gather(1, ids[0, 1:, None]).sum().item()
            count += ids.shape[1] - 1
        assert float(together[user]) == pytest.approx(nats / count, rel=1e-12)


def left(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What a tokenizer with padding_side="left" does."""
    padded = collate(examples)
    for row, length in enumerate(padded["attention_mask"].sum(1).tolist()):
        for name in padded:
            padded[name][row] = padded[name][row].roll(padded[name].shape[1] - length)
    return padded


def test_padding_on_the_left_would_mix_users() -> None:
    """The attack: GPT-2 counts positions from the left, so who is beside a user moves that user's positions."""
    model, people = gpt2().double(), Users(rows(users=6))
    mixed = Part(left([people[user][0] for user in range(6)]), torch.ones(6, 1, dtype=torch.bool))
    alone = torch.cat([user_losses(model, Part.of([left(people[user])])) for user in range(6)])
    assert not torch.allclose(user_losses(model, mixed), alone, rtol=1e-6)
    ours = Part.of([left(people[user]) for user in range(6)])
    torch.testing.assert_close(user_losses(model, ours), alone, rtol=1e-12, atol=0)


def test_label_smoothing_is_per_user() -> None:
    """Trainer's own divides by the tokens of everybody."""
    from transformers.trainer_pt_utils import LabelSmoother

    model, people = gpt2().double(), Users(rows(users=6))
    part = Part.of([collate(people[user]) for user in range(6)])
    ours = user_losses(model, part, 0.1)
    alone = []
    for user in range(6):
        one = collate(people[user])
        alone.append(LabelSmoother(0.1)(model(input_ids=one["input_ids"]), one["labels"], shift_labels=True))
    torch.testing.assert_close(ours, torch.stack(alone), rtol=1e-6, atol=0)  # theirs is summed in float32


def test_a_collator_sees_one_user_and_draws_from_its_own_seed() -> None:
    """The attack: masks drawn one after the other move for all who come after a user that was added."""
    seen: list[int] = []

    def masking(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.append(len({example["author"] for example in examples}))
        made = collate(examples)
        made["input_ids"] = made["input_ids"].masked_fill(torch.rand(made["input_ids"].shape) < 0.3, 1)
        made["token_type_ids"] = torch.full_like(made["input_ids"], int(np.random.randint(1000)))
        return made

    people = Users(rows(users=30), "author")
    data = batches(people, masking, most=100)
    everybody = data[0].parts[0].collated
    torch.manual_seed(0)
    before = torch.rand(3)
    torch.manual_seed(0)
    data.batches.draw = lambda step: PoissonBatches(30, 0.5, 3, seed=1).draw(step)[1:]  # type: ignore[method-assign]
    fewer = data[0].parts[0].collated
    assert torch.equal(torch.rand(3), before)  # the trainer's own generator is where it was
    kept = {tuple(user["labels"][0].tolist()): user for user in everybody}
    assert len(fewer) == len(everybody) - 1 and set(seen) == {1}
    for user in fewer:
        for name, tensor in kept[tuple(user["labels"][0].tolist())].items():
            assert torch.equal(user[name], tensor)


class Packing:
    """Fills rows of eight tokens and keeps what is left for the next call, as packers of streams do."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        tokens = self.left + [token for example in examples for token in example["input_ids"]]
        whole = max(8, len(tokens) // 8 * 8)
        tokens, self.left = tokens + [0] * (whole - len(tokens)), tokens[whole:]
        ids = torch.tensor(tokens[:whole]).view(-1, 8)
        return {"input_ids": ids, "labels": ids}


def test_a_collator_that_keeps_tokens_between_calls_is_refused() -> None:
    """The attack: the end of one user's text becomes the beginning of the next one's."""
    with pytest.raises(DpformerError, match="it keeps something between calls"):
        batches(Users(rows(users=30), "author"), Packing(), most=100)[0]


def test_packing_into_one_row_stays_within_a_user() -> None:
    """DataCollatorWithFlattening puts all examples it gets into one row: of one user, not of the batch."""
    from transformers import DataCollatorWithFlattening

    people = Users(rows(users=8, most=3), "author")
    part = Part.of([DataCollatorWithFlattening()(people[user]) for user in range(8)])
    assert part.inputs["input_ids"].shape[0] == part.users == 8


def test_inputs_that_cannot_be_put_together() -> None:
    with pytest.raises(DpformerError, match="its padding value is unknown"):
        Part.of([{"pixels": torch.zeros(1, 3)}, {"pixels": torch.zeros(1, 4)}])
    with pytest.raises(DpformerError, match="one row per example"):
        Part.of([{"input_ids": torch.zeros(2, 3, dtype=torch.long), "weight": torch.zeros(())}])
    with pytest.raises(DpformerError, match="inputs other than"):
        Part.of([{"input_ids": torch.zeros(1, 3)}, {"labels": torch.zeros(1, 3)}])
