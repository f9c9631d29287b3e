"""References by model and results by layout, each computed once."""

from __future__ import annotations

import pytest

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig, ParallelConfig
from tests.parallel import layouts, policy_jobs
from tests.parallel.reference import TEMPERATURE, make_reference

BUDGETS = (16, 4096)
"""Token budgets of a micro-batch: the longest row alone, and the whole batch."""


class Grid:
    """Cache of results by layout name and of references by model."""

    def __init__(self, rank_pool, folder):
        self._pool = rank_pool
        self._folder = folder
        self._references = {}
        self._measured = {}

    def reference(self, model):
        """Return the results of single-process torch for the model."""
        if model not in self._references:
            folder = self._folder / model
            self._references[model] = make_reference(model, folder, cell_config(folder, {}))
        return self._references[model]

    def measured(self, cell):
        """Return the `policy_jobs.Measured` of each rank of the layout."""
        name = layouts.name_of(cell)
        if name not in self._measured:
            reference = self.reference(cell["model"])
            self._measured[name] = self._pool.run(
                policy_jobs.measure,
                layouts.num_ranks(cell),
                cell_config(reference.folder, cell),
                reference.batch,
                BUDGETS,
            )
        return self._measured[name]


def cell_config(folder, cell):
    """Create a configuration with clipping, KL term, entropy bonus and weight decay."""
    config = TrainConfig(model=ModelConfig(path=str(folder)))
    config.parallel = ParallelConfig(**{axis: cell[axis] for axis in cell if axis != "model"})
    config.rollout.temperature = TEMPERATURE
    config.algo.kl_coef = 0.1
    config.algo.entropy_coef = 0.05
    config.optim.weight_decay = 0.1
    config.optim.micro_batch_tokens = BUDGETS[0]
    return config


@pytest.fixture(scope="session")
def grid(rank_pool, tmp_path_factory):
    found = Grid(rank_pool, tmp_path_factory.mktemp("grid"))
    found.reference("llama")  # imports the libraries
    return found
