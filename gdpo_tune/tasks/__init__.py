"""Tasks: problems, rewards and held-out metrics. One file a task, which describes itself."""
