"""Faster training of small policies: the CPU sampler, packed prompts, micro-batches by length."""
