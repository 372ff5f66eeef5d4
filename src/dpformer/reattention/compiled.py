"""Variances through LayerNorm and ReLU in one pass of compiled code each: twins of `moments.layer_norm` and
`activations.relu`, in float32."""

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from dpformer.clipping.products import in_threads
from dpformer.kernels import native
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
        peek_interpreter_stack() is not None
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
    )


def norm_variance(x: Gaussian, weight: Tensor, weight_var: Tensor, eps: float) -> Tensor:
    """The variance of γ·(x − x̄)/√(s² + eps) + β, where γ and β have the same variance, one number."""
    assert native.kernels is not None
    with torch.no_grad(), torch._C.DisableTorchFunction():  # detached values, and no use of a parameter
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
    with torch._C.DisableTorchFunction():
        both = torch.broadcast_tensors(x.mean, x.var)
        out, arrays = torch.empty(both[0].shape), [t.contiguous().view(-1).numpy() for t in both]
        threads = torch.get_num_threads() if out.numel() >= LARGE else 1
        in_threads(native.kernels.relu_variances, threads, *arrays, out.view(-1).numpy())
        return out
