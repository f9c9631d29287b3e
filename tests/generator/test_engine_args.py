"""Arguments that decide on the numbers."""

from mega_agentrl.config.schema import EngineConfig
from mega_agentrl.generator.engine_args import engine_args


def test_a_deterministic_engine_computes_each_request_alone():
    config = EngineConfig(max_concurrent=64)
    plain = engine_args(config, "model", seed=1, dtype=None)
    alone = engine_args(config, "model", seed=1, dtype=None, deterministic=True)
    assert (plain.max_num_seqs, plain.enable_prefix_caching) == (64, True)
    assert (alone.max_num_seqs, alone.enable_prefix_caching) == (1, False)
