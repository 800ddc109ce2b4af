"""Find the Pareto front of a multi-reward RL run: correctness against format and length."""

__version__ = "0.1.0"
