"""Checks of datasets of RLDS, in the files of TensorFlow Datasets."""
