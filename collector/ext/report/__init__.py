"""Reports over many stored runs: read, group, summarise and render them as a page.

``statistics`` and ``curves`` are pure. ``stored_runs`` reads manifests, and ``run_reader`` reads
storages.
"""
