"""Rollout: vLLM engines, the model that workflows see, and the Explorer that turns tasks into experiences."""
