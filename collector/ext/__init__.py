"""Extensions of the collector: they use its public interfaces, and it imports none of them."""
