"""DeepSpeed workers that turn batches of experiences into new weights.

Every rank runs the same loop over the same batch and takes its own share of the micro-batches. Only rank 0 talks to the
store, publishes weights and writes state that all ranks share. Start with `worker.py`, then `trainer.py`.

The letters of tensor shapes are listed in `docs/glossary.md`.
"""
