"""Re-Attention inside the Transformer: off, zero, set, saved, and its variances against a sampled network."""

import copy

import pytest
import torch
from torch import Tensor

from dpformer.models import Batch, Transformer
from dpformer.reattention import attention_weights, effective_error
from dpformer.reattention.track import Tracked

ITEMS, LENGTH = 30, 10
FREQUENCIES = torch.linspace(0.01, 0.5, ITEMS)
BATCH = Batch.from_histories([[1, 2, 3, 2, 2, 5, 7, 1, 22], [4, 0], [6, 29, 28, 6]], LENGTH)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("variant", [True, "literal"])
def test_without_noise_it_is_the_plain_transformer_bit_for_bit(norm: str, variant: bool | str) -> None:
    torch.manual_seed(0)
    corrected = Transformer(ITEMS, LENGTH, heads=2, norm=norm, reattention=variant)
    corrected.set_privacy(0.0, 100, FREQUENCIES)
    plain = Transformer(ITEMS, LENGTH, heads=2, norm=norm)
    plain.load_state_dict(corrected.state_dict(), strict=False)
    for seed, training in ((1, True), (2, False)):
        plain.train(training), corrected.train(training)
        losses = []
        for model in (plain, corrected):
            torch.manual_seed(seed)  # the same dropout
            losses.append(model(BATCH))
        assert torch.equal(*losses)


def test_noise_changes_it_and_more_scale_more() -> None:
    torch.manual_seed(0)
    model = Transformer(ITEMS, LENGTH, reattention=True).eval()
    changes = []
    for scale in (0.0, 0.1, 1.0):
        model.set_privacy(1.0, 100, FREQUENCIES, scale=scale)
        changes.append(model.attention_maps(BATCH)[1])
    assert 0 < (changes[1] - changes[0]).abs().max() < (changes[2] - changes[0]).abs().max()


def test_it_refuses_to_run_before_it_knows_the_noise() -> None:
    model = Transformer(ITEMS, LENGTH, reattention=True)
    with pytest.raises(RuntimeError, match=r"call model\.set_privacy"):
        model(BATCH)
    with pytest.raises(ValueError, match="the effective error has 3 items, but the model 30"):
        model.set_privacy(1.0, 10, torch.ones(3))
    model.set_privacy(1.0, 10, FREQUENCIES)
    error = effective_error(1.0, 10, FREQUENCIES)
    assert torch.equal(model.item_error, error.items) and torch.equal(model.weight_error, error.weights)
    assert {"item_error", "weight_error", "bias"} <= set(model.state_dict())
    assert "item_error" not in Transformer(ITEMS, LENGTH).state_dict()


def test_attention_maps_are_causal_and_rare_items_draw_less() -> None:
    torch.manual_seed(0)
    model = Transformer(ITEMS, LENGTH, heads=2, reattention=True, norm="pre").eval()
    model.set_privacy(1.0, 100, FREQUENCIES)
    maps = model.attention_maps(BATCH)
    assert [m.shape for m in maps] == [(3, 2, 8, 8)] * 2
    assert not maps[0].triu(1).any()
    torch.testing.assert_close(maps[0].sum(-1), torch.ones(3, 2, 8))
    plain = Transformer(ITEMS, LENGTH, heads=2, norm="pre").eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    change = maps[0] / plain.attention_maps(BATCH)[0]
    # user 0, last query: item 22 is frequent, item 1 is the rarest
    assert (change[0, :, 7, 0] < change[0, :, 7, 6]).all()


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_key_variance_against_a_network_with_noise_drawn(norm: str, activation: str) -> None:
    """The keys of both blocks, over draws of noise on every parameter, have about the tracked variance.

    Exact for the first block. Before the second one, positions share noise (the same item twice, a residual sum of
    correlated terms) and attention moves with it: the tracked variance is up to 45% too low on average, while the order
    of positions by noise, which is all that the renormalised correction uses, is right.
    """
    torch.manual_seed(0)
    model = Transformer(ITEMS, LENGTH, dim=32, reattention=True, norm=norm, activation=activation).double().eval()
    with torch.no_grad():
        model.items.weight.mul_(10)
    model.set_privacy(0.5, 100, FREQUENCIES.double())
    draws = [_keys(_with_noise(model))[1] for _ in range(200)]
    for block, (low, high) in enumerate([(0.93, 1.07), (0.55, 1.1)]):
        sampled = torch.stack([d[block] for d in draws]).var(0)
        tracked = _keys(model)[0][block].expand_as(sampled)
        real = (torch.arange(sampled.shape[2]) < BATCH.lengths[:, None])[:, None].expand(sampled.shape[:3])
        assert low < tracked[real].mean() / sampled[real].mean() < high
        by_position = torch.stack([tracked[real].mean(-1), sampled[real].mean(-1)])
        assert torch.corrcoef(by_position.log())[0, 1] > 0.98


def test_two_columns_say_the_variances_of_the_first_block() -> None:
    """All coordinates of an item are equally noisy: keys and values need no full matrix, with several heads neither."""
    torch.manual_seed(0)
    layer = Transformer(ITEMS, LENGTH, dim=32, heads=4, reattention=True).double().blocks[0].attention
    x = Tracked(torch.randn(3, 8, 32).double(), torch.rand(3, 8, 1).double())
    weight_var = torch.tensor(0.03).double()
    full = layer._variances(Tracked(x.mean, x.var.expand(3, 8, 32)), weight_var, False)
    for even, each in zip(layer._variances(x, weight_var, False), full, strict=True):
        assert even.left.shape == (3, 4, 8, 2) and each.right is None
        torch.testing.assert_close(even.full(), each.left)
    q, k = torch.randn(2, 3, 4, 8, 8).double()
    even, each = (layer._variances(Tracked(x.mean, v), weight_var, True)[0] for v in (x.var, x.var.expand(3, 8, 32)))
    for variant in ("renormalised", "literal"):
        maps = [attention_weights(q, k, key_var=var, variant=variant) for var in (even, each, each.left)]
        torch.testing.assert_close(maps[0], maps[1])
        torch.testing.assert_close(maps[1], maps[2])


def _with_noise(model: Transformer) -> Transformer:
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in noisy.named_parameters():
            deviation = model.item_error[:, None] if name == "items.weight" else model.weight_error
            p.add_(deviation * torch.randn_like(p))
    return noisy


def _keys(model: Transformer) -> tuple[list[Tensor], list[Tensor]]:
    """Tracked variances and the keys themselves, of each block."""
    variances, keys, hooks = [], [], []
    for block in model.blocks:
        hooks.append(block.attention.register_forward_pre_hook(
            lambda layer, args: variances.append(layer._variances(*args[:3])[0].full())))  # fmt: skip
        hooks.append(block.attention.project.register_forward_hook(
            lambda layer, args, out: keys.append(out.chunk(3, -1)[1][:, None])))  # fmt: skip
    with torch.no_grad():
        model.hidden(BATCH)
    for hook in hooks:
        hook.remove()
    return variances, keys


def test_bad_shapes_are_named() -> None:
    for keywords, message in [
        ({"heads": 3}, "heads is 3; it must divide dim, which is 64"),
        ({"blocks": 0}, "blocks is 0"),
        ({"norm": "batch"}, "norm is 'batch'"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
        ({"dim": 0}, "dim is 0"),
        ({"reattention": "yes"}, "reattention is 'yes'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Transformer(ITEMS, LENGTH, **keywords)


class _Scores(torch.nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, items: Tensor, lengths: Tensor) -> Tensor:
        return self.model.next_scores(items, lengths)


def test_scores_can_be_exported_with_the_correction_inside() -> None:
    torch.manual_seed(0)
    model = Transformer(ITEMS, LENGTH, dim=8, reattention=True).eval()
    model.set_privacy(2.0, 10, FREQUENCIES)
    users, length = torch.export.Dim("users", max=64), torch.export.Dim("length", min=2, max=LENGTH)
    shapes = ({0: users, 1: length}, {0: users})
    program = torch.export.export(_Scores(model), (BATCH.items, BATCH.lengths), dynamic_shapes=shapes, strict=False)
    histories = [[3, 28, 0, 0, 7], [5], [], [1, 2]]
    other = Batch.for_scores(histories, LENGTH)
    torch.testing.assert_close(program.module()(other.items, other.lengths), model.scores(histories))
