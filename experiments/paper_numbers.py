"""What the paper (Ding et al., ICML 2024) prints: NDCG@10 and HIT@10 in %, best epoch of the best setting, 5 seeds."""

PAPER: dict[str, dict[str, dict[float, tuple[float, float]]]] = {
    "ml-1m": {
        "gru": {5: (2.26, 4.58), 8: (2.40, 4.75), 10: (2.81, 5.53)},
        "lstm": {5: (2.65, 5.08), 8: (2.76, 5.41), 10: (2.95, 5.55)},
        "unshared": {5: (2.33, 4.47), 8: (2.56, 5.11), 10: (2.74, 5.39)},
        "vanilla": {5: (4.57, 8.69), 8: (7.05, 13.17), 10: (7.99, 14.82)},
        "literal": {5: (5.88, 11.13), 8: (7.70, 14.31), 10: (8.42, 15.40)},
    },
    "games": {
        "gru": {5: (1.13, 2.46), 8: (1.33, 2.22), 10: (1.47, 2.48)},
        "lstm": {5: (1.19, 2.46), 8: (1.23, 2.46), 10: (1.34, 2.51)},
        "unshared": {5: (1.16, 2.36), 8: (1.20, 2.38), 10: (1.40, 2.47)},
        "vanilla": {5: (1.37, 2.47), 8: (1.54, 2.77), 10: (1.57, 2.83)},
        "literal": {5: (1.64, 3.01), 8: (1.98, 3.70), 10: (1.99, 3.73)},
    },
}
# Variance after an activation: input, ReLU sampled, GELU sampled, analytic (ReLU).
ACTIVATIONS = [
    ("N(0, 0.01)", "3.40e-5", "2.49e-5", "3.40e-5"),
    ("N(0, 0.1)", "0.0034", "0.0025", "0.0034"),
    ("N(0, 1)", "0.3418", "0.3467", "0.3408"),
]
NANOGPT = {"6 layers, d 384": 1.47, "4 layers, d 128": 1.88}  # nats, TinyShakespeare, not private (published)
