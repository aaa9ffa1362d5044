"""Find the fastest way to train a small language model, and prove it is still the same training."""

__version__ = "0.1.0"
