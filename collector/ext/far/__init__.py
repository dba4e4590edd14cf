"""Memory of workers that share none with their parent: rows travel with the answers."""
