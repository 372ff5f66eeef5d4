"""Layers with their variance beside them: the rules of `moments`, no gradient, tiles of any size."""

import pytest
import torch
from torch import nn

from dpformer.kernels import native
from dpformer.reattention import Gaussian, gelu, layer_norm, linear, relu, track
from dpformer.reattention.track import Tracked

WEIGHT_VAR = torch.tensor(0.02)


def tracked(*shape: int, same: bool = False) -> Tracked:
    g = torch.Generator().manual_seed(0)
    mean = torch.randn(*shape, generator=g, requires_grad=True)
    return Tracked(mean, torch.rand(*shape[:-1], 1 if same else shape[-1], generator=g))


def parameters(layer: nn.Module) -> list[Gaussian]:
    return [Gaussian(p.detach(), WEIGHT_VAR) for p in layer.parameters()]


@pytest.mark.parametrize("tile", [1, 3, 512])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_layers_follow_the_rules(tile: int, same: bool, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "TILE", tile)
    torch.manual_seed(0)
    x, norm, expand, contract = tracked(2, 5, 4, same=same), nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 3)
    plain = Gaussian(x.mean.detach(), x.var)

    y = track.linear(expand, x, WEIGHT_VAR)
    torch.testing.assert_close(y.var, linear(plain, *parameters(expand)).var)
    torch.testing.assert_close(y.mean, expand(x.mean))

    y = track.layer_norm(norm, x, WEIGHT_VAR)
    torch.testing.assert_close(y.var, layer_norm(plain, *parameters(norm)).var)

    y = track.feed_forward(expand, activation, contract, x, WEIGHT_VAR)
    inner = linear(plain, *parameters(expand))
    active = {"relu": relu, "gelu": gelu}[activation](inner, mean=getattr(nn.functional, activation)(inner.mean))
    torch.testing.assert_close(y.var, linear(active, *parameters(contract)).var)
    torch.testing.assert_close(y.mean, contract(getattr(nn.functional, activation)(expand(x.mean))))
    assert y.mean.requires_grad and not y.var.requires_grad


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "in Python"])
@pytest.mark.parametrize("width", [1, 4, 16, 50, 64])
@pytest.mark.parametrize("same", [True, False])
def test_variances_of_a_layer_norm(compiled: bool, width: int, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(native, "kernels", None)
    torch.manual_seed(0)
    norm, wide = nn.LayerNorm(width), torch.randn(3, 700, 2 * width)
    nn.init.normal_(norm.weight)
    x = Tracked(wide[..., ::2] if width == 4 else wide[..., :width], torch.rand(3, 700, 1 if same else width))
    parts = [Gaussian(p.detach().double(), WEIGHT_VAR.double()) for p in norm.parameters()]
    exact = layer_norm(Gaussian(x.mean.double(), x.var.double()), *parts).var
    found = track.layer_norm(norm, x, WEIGHT_VAR).var
    torch.testing.assert_close(found.double(), exact, rtol=5e-6, atol=1e-12)
    huge = track.layer_norm(norm, Tracked(torch.full_like(x.mean, 2e36), 0 * x.var), WEIGHT_VAR).var
    assert bool(huge.isfinite().all())
    wide[1, 5, 0] = float("nan")
    assert torch.equal(track.layer_norm(norm, x, WEIGHT_VAR).var.isnan().any(-1), wide[..., 0].isnan())


def test_nothing_is_tracked_unless_asked() -> None:
    x = Tracked(tracked(2, 3, 4).mean, None)
    layer = nn.Linear(4, 4)
    for y in (
        track.linear(layer, x, None),
        track.layer_norm(nn.LayerNorm(4), x, None),
        track.feed_forward(layer, "relu", layer, x, None),
        track.dropout(nn.Dropout(0.5), x),
        track.add(x, x),
    ):
        assert y.var is None


def test_dropout_counts_the_noise_seen_through_masks_and_not_the_masks() -> None:
    """E over masks of the variance over noise, sampled: v/(1 − rate); outside training v."""
    torch.manual_seed(0)
    layer, v = nn.Dropout(0.4), 0.7
    noise = v**0.5 * torch.randn(300_000)
    through = layer(torch.ones_like(noise)) * noise  # what a random mask leaves of the noise
    x = Tracked(torch.full((1, 1, 1), 5.0), torch.full((1, 1, 1), v))
    assert track.dropout(layer, x).var.item() == pytest.approx(through.var().item(), rel=0.02)
    assert track.dropout(layer.eval(), x).var.item() == pytest.approx(v)


def test_sums_add_variances() -> None:
    x, y = tracked(2, 3, 4), tracked(2, 3, 4, same=True)
    torch.testing.assert_close(track.add(x, y).var, x.var + y.var)
