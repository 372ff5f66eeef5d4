"""Rules bind their arguments as torch does, by position and by name."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from dpformer.clipping.recording import SIGNATURES
from dpformer.models.softmax_head import softmax_loss
from tests.clipping.naive import clipped_sum, engine, norms_of, one_at_a_time, relative_error, sums
from tests.clipping.problems import B, D, T, per_user

TORCH = torch.overrides.get_testing_overrides() | {softmax_loss: softmax_loss}
del TORCH[torch.lstm]  # listed there with the arguments of packed sequences only
NAMED = [
    f
    for f, s in SIGNATURES.items()
    if f in TORCH and not any(p.kind is p.VAR_POSITIONAL for p in s.parameters.values())
]


@pytest.mark.parametrize("func", NAMED, ids=lambda f: getattr(f, "__name__", str(f)))
def test_parameters_are_named_and_ordered_as_in_torch(func) -> None:
    """Those of ours are the first of torch's; what is left out is refused by name."""
    theirs = ["input" if name == "self" else name for name in inspect.signature(TORCH[func]).parameters]
    ours = list(SIGNATURES[func].parameters.values())
    if all(p.kind is p.POSITIONAL_ONLY for p in ours):
        assert len(ours) == len(theirs)
        return
    names = [p.name for p in ours if p.name != "out"]
    theirs = [name for name in theirs if name != "out"]
    both = min(len(names), len(theirs))  # torch's own list is not always complete
    assert names[:both] == theirs[:both]


class ByName(nn.Module):
    """Square, so that a product taken the wrong way round has the right shape."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D))
        self.table, self.norm = nn.Embedding(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(other=self.w, input=x)
        y = y + torch.mm(mat2=self.w, input=x.view(-1, D)).view_as(x).sin()
        y = y + torch.addmm(mat2=self.w, mat1=x.view(-1, D), input=self.b, alpha=2, beta=0.5).view_as(x).cos()
        y = y + F.linear(bias=self.b, weight=self.w, input=x)
        y = y + F.embedding(weight=self.table.weight, input=(x > 0).long().sum(-1))
        y = y + torch.index_select(dim=0, index=(x[:, 0, 0] > 0).long(), input=self.table.weight)[:, None]
        y = torch.cat(dim=1, tensors=[y, self.b.expand(len(x), 1, -1)])
        return per_user(F.layer_norm(weight=self.norm.weight, eps=1e-3, normalized_shape=(D,), input=y))


def test_arguments_by_name() -> None:
    torch.manual_seed(0)
    model, batch = ByName().double(), (torch.randn(B, T, D, dtype=torch.float64),)
    truth = one_at_a_time(model, batch)
    norms = engine(model, batch, dp.normalize(1.0))
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-10, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-10
