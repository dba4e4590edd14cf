"""The C extension of the collector: it steps environments, numbers rows and stores few slots."""
