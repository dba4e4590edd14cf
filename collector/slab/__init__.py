"""The memory that a rollout fills: columns, their names, and progress."""
