"""Runtime: a run's processes on Ray. Starting, placing, watching and ending them."""
