"""The durable queue of experiences between explorers and trainer.

`store.ExperienceStore` is the queue, `strategies.make_strategy` says how batches are chosen from it, and
`expert.ExpertData` brings given data into them.
"""
