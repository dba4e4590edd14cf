"""Samplers with priorities, hindsight goals, mixtures and rate limits."""
