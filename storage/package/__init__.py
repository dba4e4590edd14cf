"""Package metadata: public names, moved names, and versions."""
