"""Prefect flows, one file a stage: composition only. Importing them imports neither torch nor vllm."""
