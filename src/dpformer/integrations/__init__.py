"""Where people train: Hugging Face's Trainer, Accelerate, Lightning. Each needs its own package, an extra of dpformer.

| file | what |
| --- | --- |
| `users.py` | a data set, as one list of examples per user |
| `batches.py` | Poisson batches of users, collated user by user and cut into parts |
| `session.py` | budget, sampler, clipping, noise, ledger and statement of one run |
| `vault.py` | the keys of a run, in a file of their own, and an optimizer whose state holds none |
| `losses.py` | one loss per user from the outputs of a Hugging Face model |
| `independent_users.py` | `dp.check`: a user's loss is the same without the others |
| `card.py` | privacy.json and the model card beside a saved model |
| `huggingface.py`, `accelerate.py`, `lightning.py` | the adapters |
"""
