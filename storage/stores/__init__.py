"""Row stores: a reader and a writer of rows, and the object that combines them."""
