"""Weight sync: how weights get from the trainer to the engines.

`versions` defines the interface of a sync method, for the trainer and for engines; `memory`, `checkpoint` and `nccl`
implement it. `config/sync_schedule.py` computes which explore step uses which version; `weight_check` compares an
engine's weights with the trainer's.
"""
