"""Advantage estimators, in one module for each family.

An estimator is a function with the decorator `register_advantage`, which declares its traits
(`EstimatorTraits`); its keyword-only arguments are its options (`algo.advantage_options`). Both are
read from the source before a run starts (`config.declarations`), so traits and defaults must be
literals. To add one:
1. a `register_advantage` function in a module here, which is found by itself, or in a file of your
   own; a formula with published numbers belongs into `algo/`
2. its hand-worked test in `tests/train/test_advantages.py`
3. a preset in `configs/algo/`, and `tools/make_config_reference.py`
"""
