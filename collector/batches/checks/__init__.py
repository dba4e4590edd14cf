"""Checks of blocks: values, ranges, final observations."""
