"""Reports over many stored runs: read, put in groups, put in numbers, written as a page.

``statistics`` and ``curves`` are pure; ``stored_runs`` reads manifests, ``reading`` storages.
"""
