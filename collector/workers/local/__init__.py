"""Workers on this machine: processes, or threads, over memory that they share with the parent."""
