"""Tool-QA: the small task of the smoke run, generated here."""
