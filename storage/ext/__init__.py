"""Extensions of the storage: they use its readers and writers, and it imports none of them."""
