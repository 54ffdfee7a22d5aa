"""The durable queue of experiences between explorers and trainer.

`store.ExperienceStore` is the queue, `strategies.make_strategy` selects how batches are chosen from it, and
`expert.ExpertData` mixes data-set rows into them.
"""
