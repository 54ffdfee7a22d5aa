"""Tracking: a metrics file per job, sampled rollouts, and forwarding them to MLflow, TensorBoard or W&B."""
