"""Independent checks: `verify.verify` a run folder, `audit` the mechanism. Nothing here trusts the run folder."""
