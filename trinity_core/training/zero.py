"""How much DeepSpeed's ZeRO handles at a time."""

REDUCE_BUCKET = 50_000_000
"""Gradients that are summed over the workers at a time (`reduce_bucket_size`): 100 MB in half precision, enough for a
link's whole bandwidth. DeepSpeed's default, 500 million, holds ten times as much on every GPU."""
MAX_LIVE = 1_000_000_000
"""Weights that ZeRO 3 gathers ahead at most (`stage3_max_live_parameters`), as DeepSpeed does by default."""
