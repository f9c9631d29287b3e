"""Where metrics go beside `metrics.jsonl`: one file a place."""
