"""Train batches cut to some of their rows."""

from dataclasses import fields


def select_rows(batch, rows):
    """Return a validated batch of the given rows in the given order; T does not change."""
    values = {spec.name: getattr(batch, spec.name) for spec in fields(batch)}
    picked = {name: value[list(rows)] for name, value in values.items() if hasattr(value, "dtype")}
    prompt_ids = tuple(batch.prompt_ids[row] for row in rows)
    return batch.with_fields(**picked, prompt_ids=prompt_ids).validate()
