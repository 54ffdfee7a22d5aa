"""What Prefect adds to a run: its steps as tasks and subflows, retries, artifacts, names, a person's verdicts."""
