"""The OpenAI API of the explorer's engines, and sessions: what went through it, as token ids exactly as sampled."""
