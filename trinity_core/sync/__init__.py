"""How weights get from the trainer to the engines, and when: `schedule`, `weights` (folders) and `nccl` (GPUs)."""
