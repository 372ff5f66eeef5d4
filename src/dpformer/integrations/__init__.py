"""Adapters for training frameworks: Hugging Face's Trainer, Accelerate, Lightning. Each needs an extra.

| file | what |
| --- | --- |
| `users.py` | a data set as one list of examples per user |
| `batches.py` | Poisson batches of users, collated user by user and cut into parts |
| `session.py` | budget, sampler, clipping, noise, ledger and statement of a run |
| `vault.py` | the keys of a run in a separate file, and an optimizer whose state contains none |
| `losses.py` | one loss per user from the outputs of a Hugging Face model |
| `independent_users.py` | `dp.check`: a user's loss does not depend on other users |
| `card.py` | privacy.json and the model card of a saved model |
| `huggingface.py`, `accelerate.py`, `lightning.py` | the adapters |
"""
