"""Generation as scripts/generate.py does it, of texts at once."""

from toolkit.generation import Answer, answer, make_plan


def answers(model, tokenizer, texts: list[str], batch_size: int = 8, **options) -> list[Answer]:
    return answer(model, tokenizer, texts, make_plan(model, tokenizer, options), batch_size)


def generate_text(*args, **options) -> list[list[str]]:
    """The outputs for each text."""
    return [one.outputs for one in answers(*args, **options)]
