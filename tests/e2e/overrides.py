"""Overrides that point a run at the small input of `tests/conftest.py`."""


def asset_overrides(assets, run_dir):
    return [
        f"run_dir={run_dir}",
        f"model.path={assets}/model",
        f"data.train={assets}/train.parquet",
        f"data.validation={assets}/validation.parquet",
        f"sft.train_data={assets}/demonstrations.parquet",
        f"sft.dev_data={assets}/dev.parquet",
        f"tool.search.source={assets}/corpus.jsonl",
    ]
