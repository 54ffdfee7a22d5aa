"""Tracking: a metrics file per job, sampled rollouts, and their way to MLflow, TensorBoard or W&B."""
