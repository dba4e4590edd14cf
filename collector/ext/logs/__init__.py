"""Logs of runs: a row of numbers at regular intervals, with one module per kind of target."""
