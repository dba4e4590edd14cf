"""Episodes as RLDS has them, in the files of TensorFlow Datasets, without TensorFlow."""
