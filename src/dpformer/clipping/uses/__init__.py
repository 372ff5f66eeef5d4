"""The algebra of uses: what one use of a parameter contributes to each user's gradient.

Indices: b user, t position (row of that user), the parameter has `shape`. A use knows three things:
`dense()`, the gradients written out, (B, *shape) (`add_to` adds them to others); `add_sum(c, out)`, out += Σ_b c_b g_b;
and, for pairs of kinds with a closed form, the inner products ⟨g_b, g'_b⟩ without writing anything out (pairs.py).

| kind      | gradient of user b                     | from                                                     |
| --------- | -------------------------------------- | -------------------------------------------------------- |
| Outer     | Σ_t left_bt ⊗ right_bt                 | linear layers, matmul, convolution                       |
| Ragged    | the same, with unequal numbers of rows | the softmax head                                         |
| Lookup    | Σ_t onehot(id_bt) ⊗ grad_bt            | embeddings                                               |
| Dense     | grad_b                                 | biases, LayerNorm, positions, scales: small parameters   |

‖Σ_a g⁽ᵃ⁾‖² = Σ_{a,a'} ⟨g⁽ᵃ⁾, g⁽ᵃ'⟩, so a parameter used many times needs no special case: uses of one kind join (their
rows are concatenated), and different kinds meet in a cross term.
"""

from dpformer.clipping.uses.cost import by_rows, closed_form, reach, tensor_of
from dpformer.clipping.uses.kinds import Dense, Lookup, Outer, Ragged
from dpformer.clipping.uses.pairs import Use, inner, squared, wide

__all__ = [
    "Dense",
    "Lookup",
    "Outer",
    "Ragged",
    "Use",
    "by_rows",
    "closed_form",
    "inner",
    "reach",
    "squared",
    "tensor_of",
    "wide",
]
