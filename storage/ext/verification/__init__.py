"""Verification of storages (`verify`), comparison (`diff`) and content hashes."""

from tallyroll.storage.package.moved_paths import moved_names

__getattr__ = moved_names(
    __name__, "tallyroll.storage.ext.verification.storage_checks", "CHECKS", "verify"
)
