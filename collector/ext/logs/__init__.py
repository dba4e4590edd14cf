"""Logs of runs: a row of numbers every so many transitions, and a file for each kind of target."""
