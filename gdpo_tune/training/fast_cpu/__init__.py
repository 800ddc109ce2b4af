"""Faster CPU training of the small embedded policies: sampling, packing, micro-batches."""
