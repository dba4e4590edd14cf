"""Checks of RLDS datasets in the files of TensorFlow Datasets."""
