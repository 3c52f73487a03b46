"""`minidist generate`: text from a trained language model.

Proved by: tests/commands/test_generation.py
"""

from pathlib import Path
from typing import Annotated

from minidist.commands.command import Argument, Option, Result, json_or_table
from minidist.commands.flags import within_limits


@json_or_table
def generate(
    directory: Annotated[
        Path, Argument(help="the --save directory of a trained gpt or llama, from any layout, or a step's folder in it")
    ],
    prompt: Annotated[str, Option(help="what the text begins with")] = "The ",
    tokens: Annotated[int, Option(help="how many tokens follow")] = 200,
    temperature: Annotated[
        float, Option(help="below 1 favours probable tokens; 0 takes the most probable one", callback=within_limits)
    ] = 0.8,
    top_k: Annotated[int | None, Option(help="draw from the k most probable tokens only")] = None,
    seed: Annotated[int, Option(help="seed of the draws")] = 0,
    kv_cache: Annotated[
        bool, Option(help="keep keys and values, so that a token costs one token's work; the text is the same")
    ] = True,
    from_step: Annotated[int | None, Option(help="the checkpoint of this step, not the latest one")] = None,
) -> Result:
    """Write text from the latest checkpoint of a language model, on one device; the same seed gives the same text."""
    from minidist.commands.generation import run_generation

    result = run_generation(directory, prompt, tokens, temperature, top_k, seed, from_step, kv_cache)
    # Tokens that are numbers are written with spaces between them.
    space = " " * (result["text"] == " ".join(map(str, result["tokens"])))
    return Result(result, lambda: print(f"{result['prompt']}{space}{result['text']}"))
