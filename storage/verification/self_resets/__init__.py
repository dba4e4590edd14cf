"""Environments that reset themselves within a step: found in the rows that they left."""
