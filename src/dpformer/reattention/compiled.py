"""Variances through LayerNorm and ReLU in one pass of compiled code each: twins of `moments.layer_norm` and
`activations.relu`, in float32."""

import torch
from torch import Tensor

from dpformer import compat
from dpformer.kernels import native
from dpformer.kernels.products import in_threads
from dpformer.reattention.moments import Gaussian
from dpformer.reattention.recording import recording

LARGE = 1 << 16  # numbers for which several threads pay off


def can_read(x: Gaussian) -> bool:
    """Whether compiled code is available and can read these tensors, which must not be differentiated or traced."""
    plain = all(type(t) is Tensor and not t.requires_grad for t in x)
    return plain and native.supports(*x) and not recording() and not _watched()


def _watched() -> bool:
    """Whether a transform, a tracer or forward differentiation is following torch functions: it would not see compiled
    code."""
    return (
        compat.transforms() is not None
        or torch.jit.is_tracing()
        or compat.dispatch_modes() > 0
        or compat.is_differentiating_forward()
    )


def norm_variance(x: Gaussian, weight: Tensor, weight_var: Tensor, eps: float) -> Tensor:
    """The variance of γ·(x − x̄)/√(s² + eps) + β, where γ and β have the same variance, one number."""
    assert native.kernels is not None
    with torch.no_grad(), compat.unseen():  # detached values, and no use of a parameter
        width, variance, out = x.mean.shape[-1], float(weight_var), torch.empty(x.mean.shape)
        scale = (weight.square() + weight_var).numpy()
        arrays = [native.rows_of(t.expand(x.mean.shape).reshape(-1, width)) for t in x] + [out.view(-1, width).numpy()]
        kernel = native.kernels.norm_variances

        def work(mean: object, var: object, some: object) -> None:
            kernel(mean, var, scale, some, variance, variance, eps)

        in_threads(work, torch.get_num_threads() if out.numel() >= LARGE else 1, *arrays)
        return out


def relu_variance(x: Gaussian) -> Tensor:
    """The variance of max(0, x)."""
    assert native.kernels is not None
    with compat.unseen():
        both = torch.broadcast_tensors(x.mean, x.var)
        out, arrays = torch.empty(both[0].shape), [t.contiguous().view(-1).numpy() for t in both]
        threads = torch.get_num_threads() if out.numel() >= LARGE else 1
        in_threads(native.kernels.relu_variances, threads, *arrays, out.view(-1).numpy())
        return out
