"""Environments as a collector drives them: made, prepared, and what is known of them."""
