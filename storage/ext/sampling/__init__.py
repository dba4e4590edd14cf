"""Samplers with priorities, goals in hindsight, mixtures and rate limits."""
