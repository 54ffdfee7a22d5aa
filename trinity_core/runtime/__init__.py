"""Runtime: starts, places, watches and ends a run's processes on Ray."""
