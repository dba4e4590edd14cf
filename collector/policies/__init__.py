"""What chooses actions: a policy, or a random generator."""
