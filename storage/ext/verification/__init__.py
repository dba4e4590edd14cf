"""`verify`: is everything in a storage as it was when it was written?"""

from tallyroll.storage.package.moved_paths import moved_names

__getattr__ = moved_names(
    __name__, "tallyroll.storage.ext.verification.storage_checks", "CHECKS", "verify"
)
