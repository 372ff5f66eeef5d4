"""Recipes: named sets of defaults.

`default` is the model that is likely the most accurate at the same ε (`auto`); with `--model transformer`, the defaults
of the options. `paper` is *Delving into Differentially Private Transformer* (ICML 2024), `paper-lm` its language model.
"""

from typing import Any

from dpformer.kinds.transformer import TRANSFORMER

RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        "model": TRANSFORMER.name,
        "max_length": 200,
        "dim": 64,
        "heads": 1,
        "blocks": 2,
        "dropout": 0.2,
        "shared": True,
        "norm": "post",
        "frequency_bias": False,
        "clipping": "normalize",
        "clip_norm": 1.0,
        "batch_size": 1024,
        "epochs": 100,
        "learning_rate": 3e-3,
        "weight_decay": 1e-5,
        "warmup": 0.2,
        "assume_items_public": True,
    },
}
# The paper's language model, of characters (TinyShakespeare); smaller sizes by flags.
RECIPES["paper-lm"] = {
    **RECIPES["paper"],
    "task": "lm",
    "assume_items_public": False,  # tokens are public
    "max_length": 256,
    "dim": 384,
    "heads": 6,
    "blocks": 6,
    "batch_size": None,
    "learning_rate": 1e-3,
}
