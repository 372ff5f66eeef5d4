"""What a stranger can check: `verify.verify` a run folder, `audit` the mechanism; `standalone.py` needs no dpformer."""
