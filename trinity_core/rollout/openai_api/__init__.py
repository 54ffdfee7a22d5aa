"""The OpenAI API of the explorer's engines, and sessions that record token ids exactly as sampled."""
