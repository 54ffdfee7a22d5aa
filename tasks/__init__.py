"""What Prefect adds to a run: tasks and subflows, retries, artifacts, run names, a person's verdicts."""
