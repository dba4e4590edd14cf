"""The C extension of the collector: it steps environments, and numbers and stores rows."""
