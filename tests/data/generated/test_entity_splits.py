"""Names and numbers are distinct, dealt without overlap, and reproducible."""

import pytest

from mega_agentrl.data.generated.entity_splits import (
    OPERANDS,
    Split,
    entity_names,
    make_split_inventories,
    value_names,
)


def test_every_name_is_distinct_and_values_are_no_entities():
    entities, values = entity_names(), value_names()
    assert len(set(entities)) == len(entities) == 32 * 32
    assert len(set(values)) == len(values) == 24 * 16
    assert not set(entities) & set(values)


def test_products_of_operands_all_have_four_digits():
    assert 1000 <= min(OPERANDS) ** 2
    assert max(OPERANDS) ** 2 <= 9999


@pytest.mark.parametrize("seed", [0, 1])
def test_each_name_and_number_belongs_to_exactly_one_split(seed):
    inventories = make_split_inventories(seed)
    entities = [name for split in Split for name in inventories[split].entities]
    operands = [number for split in Split for number in inventories[split].operands]
    assert sorted(entities) == sorted(entity_names())
    assert sorted(operands) == list(OPERANDS)


def test_the_deal_depends_on_the_seed_alone():
    assert make_split_inventories(3) == make_split_inventories(3)
    assert make_split_inventories(3) != make_split_inventories(4)
