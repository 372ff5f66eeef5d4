"""Hugging Face models that were saved to disk, as one gets them, train as they are."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import dpformer as dp
from tests.clipping.test_huggingface import MODELS

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", MODELS)
def test_loaded_and_trained(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).float().train()
    texts = torch.arange(10)[:, None].add(torch.arange(7)).remainder(17)  # every text counts upwards
    clipping = dp.PhantomClipping(model)
    optimizer = dp.PrivateOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.02),
        noise_multiplier=0.05,
        clip_norm=1.0,
        expected_batch_size=5,
        seed=1,
    )
    means = []
    for batch in dp.PoissonBatches(10, sample_rate=0.5, steps=15, seed=1):
        tokens = texts[batch.users]
        with clipping.users(tokens, batch[:]) as one:
            logits = model(input_ids=one, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.mT, one[:, 1:], reduction="none").mean(1)
        clipping.backward(loss, dp.normalize(1.0))
        optimizer.step(batch)
        optimizer.zero_grad()
        means.append(float(clipping.losses.mean()))
    assert means[-1] < 0.8 * means[0]
    model.save_pretrained(tmp_path / "again")  # still the model it was
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(dict(again.named_parameters()), dict(model.named_parameters()))
