"""Startup of workers and of their replacements, up to the first step."""
