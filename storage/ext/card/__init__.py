"""Cards of datasets: a page for a hub that says what a dataset is, and how it was made."""
