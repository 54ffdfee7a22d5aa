"""Inference: vLLM engines, their pool, and the model that workflows call."""
