"""Cards of datasets: a page for a hub that describes a dataset and its origin."""
