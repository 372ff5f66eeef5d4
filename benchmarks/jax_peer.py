"""The paper's model in JAX, its clipped sum by jax-privacy (`clipped_grad`: vmap over users), one jit for all."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.clipping import clipped_grad

from benchmarks.workloads import Workload

Parameters = dict[str, Any]


def make_step(w: Workload, batches: list[tuple[np.ndarray, np.ndarray]]) -> Callable[[], None]:
    """One logical step over padded physical batches, each user's gradient scaled to norm 1."""
    parameters = _parameters(w)
    optimizer = optax.adam(1e-3)
    state = optimizer.init(parameters)
    loss = partial(_loss, heads=w.heads, rate=w.dropout)
    summed = jax.jit(clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), keep_batch_dim=False, prng_argnum=3))
    key = jax.random.key(0)

    def step() -> None:
        nonlocal parameters, state, key
        total = None
        for items, targets in batches:
            key, now = jax.random.split(key)
            part = summed(parameters, items, targets, now)
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        updates, state = optimizer.update(total, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        jax.block_until_ready(parameters)

    return step


def _parameters(w: Workload) -> Parameters:
    rng, d = np.random.default_rng(0), w.dim

    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.02, shape), jnp.float32)

    def block() -> Parameters:
        linear = {name: (matrix(a, b), jnp.zeros(b)) for name, a, b in _shapes(d)}
        return {**linear, "norm1": (jnp.ones(d), jnp.zeros(d)), "norm2": (jnp.ones(d), jnp.zeros(d))}

    return {
        "items": matrix(w.items, d),
        "places": matrix(w.max_length, d),
        "blocks": [block() for _ in range(w.blocks)],
    }


def _shapes(d: int) -> tuple[tuple[str, int, int], ...]:
    return ("project", d, 3 * d), ("merge", d, d), ("expand", d, 4 * d), ("contract", 4 * d, d)


def _loss(
    parameters: Parameters, items: jax.Array, targets: jax.Array, key: jax.Array, heads: int, rate: float
) -> jax.Array:
    """Mean cross-entropy of one user's positions; the embedding is shared."""
    first, *keys = jax.random.split(key, 1 + 2 * len(parameters["blocks"]))
    h = _dropout(parameters["items"][items] + parameters["places"], first, rate)
    for i, block in enumerate(parameters["blocks"]):
        h = _block(block, h, heads, keys[2 * i : 2 * i + 2], rate)
    logs = jax.nn.log_softmax(h @ parameters["items"].T)
    each = -jnp.take_along_axis(logs, jnp.maximum(targets, 0)[:, None], 1)[:, 0]
    valid = targets >= 0
    return jnp.where(valid, each, 0).sum() / jnp.maximum(valid.sum(), 1)


def _dropout(x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def _block(p: Parameters, x: jax.Array, heads: int, keys: list[jax.Array], rate: float) -> jax.Array:
    length = x.shape[0]
    q, k, v = (t.reshape(length, heads, -1) for t in jnp.split(_linear(p["project"], x), 3, axis=-1))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(length, -1)
    x = _norm(p["norm1"], x + _dropout(_linear(p["merge"], y), keys[0], rate))
    y = _linear(p["contract"], jax.nn.relu(_linear(p["expand"], x)))
    return _norm(p["norm2"], x + _dropout(y, keys[1], rate))


def _linear(p: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    return x @ p[0] + p[1]


def _norm(p: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-5) * p[0] + p[1]
