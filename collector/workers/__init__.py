"""What the worker processes of the multiprocess collector are made of."""
