"""What policies are trained on: problems, rewards and held-out metrics. One file a task."""
