"""BERT's checkpoints: their names and fields, loading, export, and what starts from one. Installed, never copied."""
