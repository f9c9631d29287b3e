"""Parts of the generated tasks: splits of names, tokenizer, tiny model and the folder of a task."""
