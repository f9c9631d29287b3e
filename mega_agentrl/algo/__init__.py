"""Pure maths of the algorithms: tensors in, tensors out."""
