"""Results of finished and running sweeps: open, pick, compare, retrain, notebook."""
