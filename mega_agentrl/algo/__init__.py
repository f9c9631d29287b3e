"""Pure functions of the algorithms: tensors in, tensors out."""
