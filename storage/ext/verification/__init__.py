"""Verification of storages (`verify`), comparison (`diff`) and content hashes."""
