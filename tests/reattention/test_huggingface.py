"""Re-Attention in Hugging Face's GPT-2: plain without noise, right variances against sampling, exact norms."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from tests.clipping.naive import clipped_sum, engine, norms_of, one_at_a_time, relative_error, sums

transformers = pytest.importorskip("transformers")
huggingface = pytest.importorskip("dpformer.reattention.huggingface")

FREQUENCIES = torch.linspace(0.05, 1.0, 17)


def gpt2(**choices: Any) -> nn.Module:
    config = transformers.GPT2Config(
        **{"vocab_size": 17, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0,
           "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2, **choices}
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def use(model: nn.Module, noise: float = 2.0, **choices: Any) -> nn.Module:
    settings = {"noise_multiplier": noise, "expected_batch_size": 10, "frequencies": FREQUENCIES, **choices}
    huggingface.use_reattention(model, **settings)
    return model


class LossPerUser(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        logits = self.body(input_ids=x, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.mT, x[:, 1:], reduction="none").mean(1)


def tokens(users: int = 4) -> Tensor:
    return torch.randint(0, 17, (users, 6), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("variant", ["renormalised", "literal"])
def test_without_noise_it_is_plain_attention(variant: str) -> None:
    plain = gpt2().double().eval()
    corrected = use(copy.deepcopy(plain), noise=0.0, variant=variant)
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[1, :2] = 0  # left padding, as Hugging Face writes it
    for given in ({}, {"attention_mask": mask}):
        expected = plain(input_ids=tokens(), use_cache=False, **given).logits
        got = corrected(input_ids=tokens(), use_cache=False, **given).logits
        seen = mask.bool() if given else torch.ones(4, 6, dtype=torch.bool)
        torch.testing.assert_close(got[seen], expected[seen])


def test_noise_changes_attention_towards_known_keys() -> None:
    plain, noisy = gpt2(initializer_range=0.5).eval(), use(gpt2(initializer_range=0.5)).eval()
    before = plain(input_ids=tokens(), use_cache=False).logits
    after = noisy(input_ids=tokens(), use_cache=False).logits
    assert not torch.allclose(before, after, atol=1e-3)


@pytest.mark.parametrize("users", [3, 6])  # 6 users of 6 tokens: B = T
@pytest.mark.parametrize("variant", ["renormalised", "literal"])
def test_norms_stay_exact(users: int, variant: str) -> None:
    model = LossPerUser(use(gpt2(initializer_range=0.3), variant=variant)).double()
    batch = (tokens(users),)
    truth = one_at_a_time(model, batch)
    norms = engine(model, batch, dp.normalize(1.0))
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-9


def test_first_keys_have_the_variance_that_sampling_finds() -> None:
    """Keys of the first block over many draws of all parameters with their effective errors."""
    model = gpt2(n_embd=32, initializer_range=0.5).double().eval()
    use(model, noise=0.2)
    body, x = model.transformer, tokens(2)
    seen: list[Tensor] = []
    original = body.noise.linear
    body.noise.linear = lambda layer, m, v, columns: seen.append(original(layer, m, v, columns)) or seen[-1]
    model(input_ids=x, use_cache=False)
    predicted = seen[0]  # (B, L, d): of the keys of block 0

    torch.manual_seed(0)
    state = {name: p.detach().clone() for name, p in body.named_parameters()}
    draws = []
    attn, ln = body.h[0].attn, body.h[0].ln_1
    with torch.no_grad():
        for _ in range(800):
            for name, p in body.named_parameters():
                if name.split(".")[0] in ("wte", "wpe") or name.startswith(("h.0.ln_1", "h.0.attn.c_attn")):
                    sd = body.noise.item_var.sqrt()[:, None] if name.startswith("wte") else body.noise.weight_var.sqrt()
                    p.copy_(state[name] + sd * torch.randn_like(p))
            normed = ln(body.wte(x) + body.wpe.weight[: x.shape[1]])
            draws.append(attn.c_attn(normed)[..., 32:64])
    found = torch.stack(draws).var(0)
    ratio = predicted.sum(-1) / found.sum(-1)
    assert float(ratio.min()) > 0.85 and float(ratio.max()) < 1.15, ratio


def test_frozen_parameters_have_no_noise() -> None:
    model = use(gpt2())
    model.requires_grad_(False)
    body = model.transformer
    seen: list[Tensor] = []
    original = body.noise.linear
    body.noise.linear = lambda layer, m, v, columns: seen.append(original(layer, m, v, columns)) or seen[-1]
    model(input_ids=tokens(), use_cache=False)
    assert seen and not any(bool(v.any()) for v in seen)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="frequencies has 3 tokens, but the model 17"):
        use(gpt2(), frequencies=torch.ones(3))
    with pytest.raises(ValueError, match="variant is 'other'"):
        use(gpt2(), variant="other")
    with pytest.raises(ValueError, match="supports GPT-2; this is a Linear"):
        use(nn.Linear(2, 2))
    model = use(gpt2()).eval()
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(tokens(1), max_new_tokens=2, do_sample=False, use_cache=True)
    assert model.generate(
        tokens(1)[:, :3], max_new_tokens=2, min_new_tokens=2, do_sample=False, use_cache=False
    ).shape == (1, 5)


def test_adapters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(gpt2(), config)
    with pytest.raises(ValueError, match=r"c_attn is a Linear: remove adapters"):
        use(adapted.base_model.model)
