"""The smoke task: questions that need a calculator, a look-up, or both, made from a seed."""
