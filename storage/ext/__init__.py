"""Extensions of the storage. They use its readers and writers; the core never imports them."""
