"""Prefect flows, one file per flow: composition only. Importing them imports neither torch nor vllm."""
