"""Checks of what blocks hold: values, ranges, final observations."""
