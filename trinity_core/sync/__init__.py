"""Weight sync: how weights get from the trainer to the engines, and when.

`versions` is the interface of a sync method, for the trainer and for engines; `memory`, `checkpoint` and `nccl`
implement it; `versions.open_versions` finds it by name. `schedule` says which explore step uses which version,
`weight_check` how an engine shows that it holds the trainer's weights.
"""
