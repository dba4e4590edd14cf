"""Memory that a parent and its workers share."""
