"""The ``rlds`` format: RLDS episodes in files of TensorFlow Datasets, without TensorFlow."""
