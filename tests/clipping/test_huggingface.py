"""Hugging Face models as they are: GPT-2 (Conv1D, tied), Llama (RMSNorm, rotary), GPT-NeoX (Pythia)."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import dpformer as dp
from tests.clipping.naive import clipped_sum, engine, norms_of, one_at_a_time, relative_error, sums
from tests.clipping.problems import next_token_loss

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 17, "max_position_embeddings": 8, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}


def gpt2(tied: bool = True) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=12, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(tied: bool) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=tied, **SIZES,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def pythia(tied: bool) -> nn.Module:
    config = transformers.GPTNeoXConfig(
        hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, hidden_dropout=0.0,
        attention_dropout=0.0, tie_word_embeddings=tied, **SIZES,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config)


class LossPerUser(nn.Module):
    """A causal language model with one loss per user."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return next_token_loss(self.body(input_ids=x, use_cache=False).logits, x)


MODELS = {
    f"{make.__name__}-{'tied' if tied else 'untied'}": partial(make, tied)
    for make in (gpt2, llama, pythia)
    for tied in (True, False)
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("users", [3, 6])  # 6 users of 6 tokens: B = T
def test_norms_and_sums(name: str, users: int) -> None:
    torch.manual_seed(0)
    body = MODELS[name]()
    tied = body.get_input_embeddings().weight is body.get_output_embeddings().weight
    assert tied == name.endswith("-tied")
    model = LossPerUser(body).double()
    batch = (torch.randint(0, 17, (users, 6)),)
    truth = one_at_a_time(model, batch)
    norms = engine(model, batch, dp.normalize(1.0))
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-9


def test_lora_of_peft() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    body = peft.get_peft_model(
        gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    )
    for name, p in body.named_parameters():
        if "lora_B" in name:  # zero at the start, which would leave lora_A without a gradient
            nn.init.normal_(p)
    model = LossPerUser(body).double()
    batch = (torch.randint(0, 17, (4, 6)),)
    truth = one_at_a_time(model, batch)
    norms = engine(model, batch, dp.clip(0.5))
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.clip(0.5))) < 1e-9


def test_grouped_products_of_mixtral() -> None:
    """The default for experts: rows sorted by expert, one product by groups (torch has it in float32 only)."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, num_experts_per_tok=2, **SIZES,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    model = LossPerUser(transformers.MixtralForCausalLM(config))
    batch = (torch.randint(0, 17, (4, 6)),)
    truth = one_at_a_time(model, batch)
    norms = engine(model, batch, dp.clip(0.5))
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-4, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.clip(0.5))) < 1e-4
